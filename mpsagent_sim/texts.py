"""Every text MPS writes or answers, as recorded (driver 580, binary version 13000). Misspellings are NVIDIA's."""

BINARY_VERSION = 13000
DRIVER_VERSION = 580

HEADER = "CUDA MPS Control for Linux/Unix/QNX."
COPYRIGHT = "Copyright (C) 2003 - 2025 NVIDIA Corporation."
VERSION = f"{HEADER} Binary version: {BINARY_VERSION}\n{COPYRIGHT}\n\n"
HELP = (
    f"{HEADER}\n{COPYRIGHT}\n"
    """
  This program allows multiple CUDA processes to share a single GPU context. \
For information on how to use the CUDA MPS, see the nvidia-cuda-mps-control manual page.

nvidia-cuda-mps-control [options] [command]
OPTIONS:
  -h,--help                Print this message
  -d,--daemon              Setup the daemon in the background
  -f,--forground           Setup the daemon in the foreground
  -M,--multiuser-server    Enable multi-user mode
  -q,--ready-devices      Prepare the daemon to query devices on startup

COMMAND:
  start_server -uid <user id>
                       Start a new instance of nvidia-cuda-mps-server with the given user ID
  quit
                       Terminate the controller
  get_server_list
                       Print out a list of servers
  get_server_status <PID>
                       Print out the status of the server
  get_client_list <PID>
                       List the client applications connected to the server
  get_device_client_list [<PID>]
                       List the devices and their client applications
  ps [-p PID]
                       Report a snapshot of the current client processes
  set_default_active_thread_percentage <percentage>
                       Set default active thread percentage for upcoming servers
  get_default_active_thread_percentage
                       Query the current default available thread percentage
  set_active_thread_percentage <PID> <percentage>
                       Override the active thread percentage of the MPS server
  get_active_thread_percentage <PID>
                       Query the current active thread percentage of the MPS server
  set_default_device_pinned_mem_limit <dev> <value>
                       Set default device pinned memory for upcoming servers
  get_default_device_pinned_mem_limit <dev>
                       Query the current default pinned memory limit for the device
  set_device_pinned_mem_limit <PID> <dev> <value>
                       Override the device pinned memory limit for MPS servers
  get_device_pinned_mem_limit <PID> <dev>
                       Query the current device pinned memory limit of the MPS server for the device
  set_default_client_priority <priority>
                       Sets default client priority for incoming clients
  get_default_client_priority
                       Query the current priority value that will be used for new clients
  terminate_client <server PID> <client PID>
                       Terminate all the outstanding GPU work of the MPS client process running on the MPS server
  device_query [<PID>] [--csv]
                       Enumerate all usable devices

"""
)

# exit status 1, on standard error
NO_DAEMON = "Cannot find MPS control daemon process\n"
NO_AUTHENTICATION = "Cannot authenticate or connect to MPS control daemon process\n"
CANNOT_SEND = "Cannot send command to MPS control daemon process\n"
# exit status 1, on standard output
ALREADY_RUNNING = "An instance of this daemon is already running\n"

# control.log
STARTING = "Starting control daemon using socket {pipe}/control"
CONNECT_HINT = "To connect CUDA applications to this daemon, set env CUDA_MPS_PIPE_DIRECTORY={pipe}"
CONTROL_VERSION = f"CUDA MPS Control binary version: {BINARY_VERSION}"
ACCEPTING = "Accepting connection..."
NEW_UI = "NEW UI"
UI_CLOSED = "UI closed"
COMMAND = "Cmd:{command}"
UNABLE_TO_ACCEPT = "Unable to accept connection"
KIND_UNREADABLE = "Unable to read new connection type information"
NOT_PRIVILEGED = "Unable to accept priviliged connection from other user"
STRANGE_SERVER = "NEW SERVER {pid}: Ignoring old connection request"
NEW_DEBUGGEE = "NEW DEBUGGEE {pid} from user {uid}"
UNKNOWN_KIND = "Unknown type of connection"
NO_CREDENTIALS = "User did not send valid credentials"
CLIENT_ATTACHED = "NEW CLIENT {pid} from user {uid}: Server already exists"
CLIENT_PENDING = "NEW CLIENT {pid} from user {uid}: Server is not ready, push client to pending list"
STARTING_SERVER = "Starting new server {pid} for user {uid}"
SERVER_READY = "NEW SERVER {pid}: Ready"
SERVER_FAILED = "Server encountered a fatal exception. Shutting down"
SERVER_EXITED = "Server {pid} exited with status {status}"
TRY_FIRST = "Try shutting down server {pid}, backoff is disabled"
TRY_AGAIN = "Try shutting down server {pid}, backoff is enabled"
SERVER_BUSY = "Server {pid} has {count} active worker threads. Server will not shutdown."
NEXT_TRY = "Control will try shutting down server {pid} again in at most {ms}ms"
FORCE = "Force shutting down server {pid}"
QUIT_TIMEOUT = "quit command issued with timeout of {seconds}"
REMOVED_SHM = "Removed Shm file at "
EXIT = "Exit with status {status}"

# answers of the control daemon
SERVER_NOT_FOUND = "Server {pid} not found"
NO_SERVER = "Server not found"
UNKNOWN_COMMAND = 'Unknown command "{command}"'
UID_REQUIRED = "A user id (UID) is required to start a new server"
NO_PRIVILEGE = (
    "Insufficient privileges for UID {uid}. Control deamon settings can only be modified by the user who started it "
    "or by the root user."
)
NO_QUIT_PRIVILEGE = "Not enough privilege to execute quit command"
BAD_PERCENTAGE = "Invalid percentage, expected between (0.0, 100.0]"  # log only
NO_DEFAULT_LIMIT = "No default pinned memory limit set for the device!"  # log only
DEVICE_HEADER = (
    "Device Ordinal  PCI IDs        UUID                                      Name                              "
    "Attributes"
)
DEVICE_HEADER_CSV = "Device Ordinal,PCI IDs,UUID,Name,Attributes"
PS_HEADER = "PID       ID        SERVER         DEVICE                    NAMESPACE      COMMAND        "

# server.log
LOG_DIRECTORY = "Using log directory: {directory}"
SERVER_BEGIN = (
    "Startup",
    "Connecting to control daemon on socket: {pipe}/control",
    "Initializing server process",
)
START_FAILED = ("Driver initialization failed with: {error}", "Failed to start : {error}")
CREATING_CONTEXT = "Creating server context on device {device} ({name})"
DESTROY_CONTEXT = "Destroy server context on device {device} ({name})"
SHARED_MEMORY = "Created anonymous shared memory region mps.shm.{uid}.{pid}"
SERVER_VERSION = f"CUDA MPS Server for Linux/Unix. Binary version: {BINARY_VERSION}"
DRIVER = f"Display Driver version: {DRIVER_VERSION}"
PERCENTAGE = "Active Threads Percentage set to {percentage}"
MEMORY_LIMIT = "Device pinned memory limit for device {device} set to {limit:#x} bytes"
PRIORITY = "Server Priority set to {priority}"
CLIENT_PRIORITY = "Client Priority set to {priority}"
STARTED = "Server has started"
REQUEST = "Received new client request for {{PID: {pid}, Context ID: {context}}}"
CONNECTED = "Client {{PID: {pid}, Context ID: {context}}} connected"
WORKER = "Creating worker thread for client {{PID: {pid}, Context ID: {context}}}"
ASSOCIATED = "Device {name} (uuid {uuid}) is associated"
STATUS = "Status of client {{PID: {pid}, Context ID: {context}}} is ACTIVE"
LOST = "Server failed to recevie command with status 806, assuming client {{PID: {pid}, Context ID: {context}}} exit"
EXITING_CLIENT = "Client {{PID: {pid}, Context ID: {context}}} exiting. Number of active client contexts is {count}."
DISCONNECTED = "Client process {pid} disconnected"
NOTIFIED = "Server has been notified to shutdown"
UNABLE_TO_SHUTDOWN = "Server was unable to shutdown due to {count} active clients"
FINISHING = "Waiting for current clients to finish"
EXITING = "Exiting"
MAX_CLIENTS = "Failed to accept new client. Maximum number of clients ({count}) reached."
TEARDOWN = "Server teardown in progress. Refusing to accept new client {{PID: {pid}, Context ID: {context}}}"
NOT_ACCEPTED = "Failed to accept client {{PID: {pid}, Context ID: {context}}} with status 807"
FATAL = "Client {{PID: {pid}, Context: {context}}} encountered a fatal GPU error."
HANDLING = "Server is handling a fatal GPU error."
TORN_DEVICE = "Client {{PID: {pid}, Context ID: {context}}} on device {device} to be torn down"
TORN_PROCESS = "All clients belonging to error trigging process {pid} will be torn down"
TORN_CLIENT = "Client {{PID: {pid}, Context ID: {context}}} on the error-trigging process {pid} to be torn down"
RESET_DEVICES = "The following devices will be reset:"
STICKY = "The following client process have a sticky error set:"
REQUESTING_EXIT = "MPS server requesting client {{PID: {pid}, Context ID: {context}}} to exit"
TERMINATED = "Client termination succeeded."
NO_CONTEXT = "Client termination request failed: There is no active client context found for process {pid}."
NOT_TERMINATED = "Client termination failed with invalid device context."
DEVICE_QUERY = "Received device query command. There are {count} devices"

# written into server.log by a client
BAD_VISIBLE_DEVICES = (
    "Invalid CUDA_VISIBLE_DEVICES.",
    "Client requested {ordinal} which is not a valid GPU ID in the MPS visible set of devices",
    "Please set CUDA_VISIBLE_DEVICES with a GPU ID less than {count} or consider using UUIDs.",
)
INVISIBLE_DEVICE = (
    "Invalid set of visible devices.",
    "Device (uuid {uuid}) is invisible to this MPS server.",
    "Please check the CUDA_VISIBLE_DEVICES set in the MPS control environment.",
)
