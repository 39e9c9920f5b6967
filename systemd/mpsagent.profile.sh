# The pipe directory for login shells, where the policy has another than NVIDIA's default; written by the agent.
if [ -r /run/mpsagent/user.env ]; then
    while IFS='=' read -r mpsagent_name mpsagent_value; do
        case "$mpsagent_name" in
        CUDA_MPS_PIPE_DIRECTORY) export CUDA_MPS_PIPE_DIRECTORY="$mpsagent_value" ;;
        esac
    done </run/mpsagent/user.env
    unset mpsagent_name mpsagent_value
fi
