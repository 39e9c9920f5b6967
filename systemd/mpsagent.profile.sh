# For login shells: the pipe directory, where the policy has another than NVIDIA's default, and the GPUs of an instance, where there
# are more in the machine; written by the agent. Who has chosen GPUs already keeps them.
if [ -r /run/mpsagent/user.env ]; then
    while IFS='=' read -r mpsagent_name mpsagent_value; do
        case "$mpsagent_name" in
        CUDA_MPS_PIPE_DIRECTORY) export CUDA_MPS_PIPE_DIRECTORY="$mpsagent_value" ;;
        CUDA_VISIBLE_DEVICES) export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-$mpsagent_value}" ;;
        esac
    done </run/mpsagent/user.env
    unset mpsagent_name mpsagent_value
fi
