#!/usr/bin/env bash
# Several machines on one: nodes.sh NODES COMMAND...
#
# Every node has a network, processes, a host name and shared memory of its own, and they are joined by a bridge; no name stands for any of
# them. The command, which is Open MPI 4's launcher, finds them at 10.77.0.1 and up, and starts processes there without ssh. Run by `unshare`
# with a network, mounts and processes of its own, whose end takes all of this away. Exits with 77 where the system does not allow it.
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
# Numbers of processes begin anew here, by which launchers name what they leave in such a folder.
export TMPDIR=$here

for ((node = 1; node <= nodes; node++)); do
    # The node is there for as long as its first process.
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

# What the launcher takes for ssh: HOST COMMAND...
cat >"$here/enter" <<END
#!/usr/bin/env bash
read -r first <"$here/\$1"
shift
export TMPDIR="$here"
exec nsenter --net --uts --ipc --pid --mount --root --wd --target "\$first" bash -c "\$*"
END
chmod +x "$here/enter"
# Every node believes that all cores are its own.
export OMPI_MCA_plm_rsh_agent="$here/enter" OMPI_MCA_hwloc_base_binding_policy=none
"$@"
