#!/usr/bin/env bash
# Several machines on one: nodes.sh NODES COMMAND...
#
# Every node has its own network, processes, host name and shared memory. A bridge joins the nodes, and no host name resolves to any of
# them. The command, the launcher of Open MPI 4 or of MPICH, finds them at 10.77.0.1 and up, and starts processes there without ssh. `unshare`
# runs this script in namespaces of its own for network, mounts and processes, and their end removes everything. Exits with 77 if the
# system refuses it.
set -euo pipefail
nodes=$1
shift
refused() { echo "$1" >&2; exit 77; }

ip link set lo up
ip link add fabric type bridge || refused "no bridge can be made"
ip address add 10.77.0.254/24 dev fabric
ip link set fabric up
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
# Process IDs start again at 1 in this namespace, and launchers name their temporary files by them, so the files get a folder of their own.
export TMPDIR=$here

for ((node = 1; node <= nodes; node++)); do
    # The node exists as long as its first process.
    unshare --net --uts --ipc --pid --mount --mount-proc --fork --kill-child bash -c '
        hostname "node$1" && mount -t tmpfs none /dev/shm && ip link set lo up && touch "$2" && exec sleep infinity
    ' node "$node" "$here/$node.is-up" &
    outer=$!
    until [ -e "$here/$node.is-up" ]; do
        kill -0 "$outer" 2>/dev/null || refused "no node can be made"
        sleep 0.01
    done
    first=$(tr -d ' ' <"/proc/$outer/task/$outer/children")
    echo "$first" >"$here/10.77.0.$node"
    ip link add "port$node" type veth peer name eth0 netns "$first" || refused "no link can be made"
    ip link set "port$node" master fabric up
    nsenter --net --target "$first" sh -c "ip address add 10.77.0.$node/24 dev eth0 && ip link set eth0 up"
done

# The replacement of ssh for the launcher: HOST COMMAND...
cat >"$here/enter" <<END
#!/usr/bin/env bash
read -r first <"$here/\$1"
shift
export TMPDIR="$here"
exec nsenter --net --uts --ipc --pid --mount --root --wd --target "\$first" bash -c "\$*"
END
chmod +x "$here/enter"
# Every node uses all cores as if they were its own, so ranks are not bound to cores.
export OMPI_MCA_plm_rsh_agent="$here/enter" OMPI_MCA_hwloc_base_binding_policy=none
# UCX, over which MPICH communicates between machines, warns of the messages that a failed communicator leaves.
export HYDRA_LAUNCHER=rsh HYDRA_LAUNCHER_EXEC="$here/enter" UCX_LOG_LEVEL=error
"$@"
