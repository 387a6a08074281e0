# shellcheck shell=bash
# Sourced by tests that need several hosts on one machine: each is a network namespace, held open by a sleeping
# process, with one link to a switch that is this namespace. No root needed: re-runs the test in a user namespace
# of its own first.
#   inside_namespaces "$0" "$@"   make_hosts COUNT MEGABITS-PER-SECOND (0: not shaped)
# Then host N has the address 10.78.0.(N+1), and `on N COMMAND…` runs there.

# The network of these hosts has nobody else.
export REKINDLE_AGENT_INSECURE=true REKINDLE_COORDINATOR_INSECURE=true

inside_namespaces() {
  [ -n "${REKINDLE_NET_INSIDE-}" ] && return
  unshare -Urn true 2>/dev/null || {
    echo "no user namespaces here"
    exit 77
  }
  REKINDLE_NET_INSIDE=1 exec unshare -Urmn --kill-child --pid --fork --mount-proc "$@"
}

begin_work() {
  work=$(mktemp -d /dev/shm/rekindle-net.XXXXXX)
  trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$work"' EXIT
}
fail() {
  echo "FAILED: $*"
  tail -n 15 "$work"/*.log
  exit 1
}

PATH=$PATH:/usr/sbin:/sbin # tc, for users
holders=()
on() {
  local host=$1
  shift
  nsenter --net="/proc/${holders[$host]}/ns/net" "$@"
}

# Shaped in both directions: at the host what it sends, at the switch what it receives.
shape() { tc qdisc add dev "$1" root tbf rate "${2}mbit" burst 256kb latency 100ms; }
make_hosts() {
  local count=$1 mbit=$2 host
  ip link set lo up
  ip link add br0 type bridge
  ip link set br0 up
  for host in $(seq 0 $((count - 1))); do
    unshare -n sleep 900 &
    holders[host]=$!
    for _ in $(seq 100); do
      [ "$(readlink "/proc/${holders[$host]}/ns/net")" != "$(readlink /proc/self/ns/net)" ] && break
      sleep 0.05
    done
    ip link add "sw$host" type veth peer name eth0 netns "${holders[$host]}"
    ip link set "sw$host" master br0 up
    on "$host" ip link set lo up
    on "$host" ip addr add "10.78.0.$((host + 1))/24" dev eth0
    on "$host" ip link set eth0 up
    [ "$mbit" = 0 ] && continue
    shape "sw$host" "$mbit" 2>/dev/null || {
      echo "no tbf here"
      exit 77
    }
    on "$host" tc qdisc add dev eth0 root tbf rate "${mbit}mbit" burst 256kb latency 100ms
  done
}

# What host $1 sends to host $2 is lost, silently: it goes to an address that nobody has.
lose() { on "$1" ip neigh replace "10.78.0.$(($2 + 1))" lladdr 02:00:00:00:00:99 nud permanent dev eth0; }
heal() { on "$1" ip neigh del "10.78.0.$(($2 + 1))" dev eth0; }

sent_by() { on "$1" cat /proc/self/net/dev | awk '$1 == "eth0:" { print $10 }'; }
now_us() { echo "${EPOCHREALTIME/./}"; }

# A checkpoint of $2 tensors of $3 MiB, 8 if not said, in directory $1.
make_model() {
  python3 - "$1" "$2" "${3:-8}" <<'PY'
import json, os, struct, sys
os.makedirs(sys.argv[1])
rows, tensors = 512 * int(sys.argv[3]), int(sys.argv[2])
size = rows * 1024 * 2
header = {f"model.layers.{i}.mlp.up_proj.weight": {"dtype": "BF16", "shape": [rows, 1024],
          "data_offsets": [i * size, (i + 1) * size]} for i in range(tensors)}
text = json.dumps(header).encode()
text += b" " * (-len(text) % 8)
with open(sys.argv[1] + "/model.safetensors", "wb") as f:
    f.write(struct.pack("<Q", len(text)) + text)
    for _ in range(tensors):
        f.write(os.urandom(size))
PY
}

# The tensors of the only copy in store $2 are those of the checkpoint $1.
right_copy() {
  python3 - "$1" "$2/models" <<'PY'
import glob, json, os, struct, sys
def tensors(path):
    out = {}
    for name in glob.glob(path + "/*.safetensors"):
        with open(name, "rb") as f:
            data = f.read()
        (n,) = struct.unpack("<Q", data[:8])
        for k, v in json.loads(data[8:8 + n]).items():
            if k != "__metadata__" and k.startswith("model."):
                out[k] = data[8 + n + v["data_offsets"][0]:8 + n + v["data_offsets"][1]]
    return out
copies = [os.path.dirname(m) for m in glob.glob(sys.argv[2] + "/*/*/rekindle.manifest")]
sys.exit(0 if len(copies) == 1 and tensors(sys.argv[1]) == tensors(copies[0]) else 1)
PY
}

# On host $1, with a fresh store, once it is registered; its process is ${agents[$1]}. Wants $rekindle and
# $coordinator (an address) to be set. With $life the fleet knows it as hostN$life, a host like no other before.
agents=()
start_agent() {
  local host=$1
  shift
  : "${rekindle:?}" "${coordinator:?}"
  rm -rf "$work/store$host" "$work/done$host"
  : >"$work/agent$host.log"
  # Not by on(): its process must be the agent itself, to be killed.
  nsenter --net="/proc/${holders[$host]}/ns/net" "$rekindle" agent --node-id "host$host${life-}" \
    --listen "10.78.0.$((host + 1)):7400" --store "$work/store$host" --coordinator "$coordinator" --log-level info \
    "$@" >"$work/agent$host.log" 2>&1 &
  agents[host]=$!
  for _ in $(seq 200); do
    grep -q coordinator.connected "$work/agent$host.log" && return
    sleep 0.05
  done
  fail "agent $host did not register"
}
kill_agents() {
  local host
  for host in "$@"; do
    kill -KILL "${agents[$host]}" 2>/dev/null || true
    wait "${agents[$host]}" 2>/dev/null || true
  done
}
pull() {
  local host=$1
  "$rekindle" pull m@1 --store "$work/store$host" --transport tcp --json --quiet \
    >"$work/pull$host.json" 2>"$work/pull$host.log" && now_us >"$work/done$host"
}
