#!/usr/bin/env bash
# Two hosts joined by a veth cable: a pull over IPv4 through the coordinator, one over IPv6 straight from the
# peer, and a cable that is pulled out in the middle: NO_SOURCE, then a resume; for a moment; with a fallback.
#   two_hosts.sh REKINDLE-BINARY
set -euo pipefail
rekindle=$1

if [ "${2-}" != inside ]; then
  unshare -Urn true 2>/dev/null || { echo "no user namespaces here"; exit 77; }
  exec unshare -Urmn --kill-child --pid --fork --mount-proc "$0" "$rekindle" inside
fi

# The network of these hosts has nobody else.
export REKINDLE_AGENT_INSECURE=true REKINDLE_COORDINATOR_INSECURE=true

work=$(mktemp -d /dev/shm/rekindle-net.XXXXXX)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$work"' EXIT
fail() { echo "FAILED: $*"; tail -n 20 "$work"/*.log; exit 1; }

# Host a is this namespace, host b another one, held open by a sleeping process.
unshare -n sleep 300 &
b=$!
for _ in $(seq 100); do [ "$(readlink /proc/$b/ns/net)" != "$(readlink /proc/self/ns/net)" ] && break; sleep 0.05; done
on_b() { nsenter --net="/proc/$b/ns/net" "$@"; }
ip link set lo up
ip link add a0 type veth peer name b0
ip link set b0 netns "$b"
ip addr add 10.77.0.1/24 dev a0
ip -6 addr add fd77::1/64 dev a0 nodad
ip link set a0 up
on_b ip link set lo up
on_b ip addr add 10.77.0.2/24 dev b0
on_b ip -6 addr add fd77::2/64 dev b0 nodad
on_b ip link set b0 up

python3 - "$work/model" <<'PY'
import json, os, struct, sys
os.makedirs(sys.argv[1])
rows, tensors = 4096, 12
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

"$rekindle" coordinator --listen 10.77.0.1:7300 --state "$work/state" >"$work/coordinator.log" 2>&1 &
# Listening on every address: what it advertises is the one used towards the coordinator.
"$rekindle" agent --node-id a --listen '[::]:7400' --advertise 10.77.0.1 --store "$work/store-a" \
  --coordinator 10.77.0.1:7300 --max-rate 24MB >"$work/a.log" 2>&1 &
for _ in $(seq 200); do grep -q coordinator.connected "$work/a.log" && break; sleep 0.05; done
grep -q coordinator.connected "$work/a.log" || fail "agent a did not register"
"$rekindle" publish m@1 "$work/model" --store "$work/store-a" --coordinator 10.77.0.1:7300 --quiet \
  >"$work/publish.log" 2>&1 || fail publish

tensors_equal() {
  python3 - "$work/model" "$1" <<'PY'
import json, struct, sys
def tensors(path):
    with open(path + "/model.safetensors", "rb") as f:
        data = f.read()
    (n,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + n])
    return {k: data[8 + n + v["data_offsets"][0]:8 + n + v["data_offsets"][1]]
            for k, v in header.items() if k != "__metadata__"}
sys.exit(0 if tensors(sys.argv[1]) == tensors(sys.argv[2]) else 1)
PY
}

echo "1. pull over IPv4 through the coordinator"
on_b "$rekindle" pull m --to "$work/out4" --coordinator 10.77.0.1:7300 --json --quiet >"$work/pull4.json" 2>"$work/pull4.log" ||
  fail "pull over IPv4"
grep -q '"transport":"tcp"' "$work/pull4.json" || fail "not over tcp"
tensors_equal "$work/out4" || fail "bytes differ"

echo "2. pull over IPv6 straight from the peer"
on_b "$rekindle" pull m@1 --from '[fd77::1]:7400' --to "$work/out6" --quiet >"$work/pull6.log" 2>&1 ||
  fail "pull over IPv6"
tensors_equal "$work/out6" || fail "bytes differ"

# A pull on host b into $work/NAME, past its first tiles. Its process is $pull.
sessions=$(grep -c session.open "$work/a.log")
start_pull() {
  local name=$1
  shift
  on_b timeout 60 "$rekindle" pull m@1 --to "$work/$name" --coordinator 10.77.0.1:7300 --json --quiet \
    --log-level info "$@" >"$work/$name.json" 2>"$work/$name.log" &
  pull=$!
  for _ in $(seq 200); do [ "$(grep -c session.open "$work/a.log")" -gt "$sessions" ] && break; sleep 0.05; done
  sleep 0.7
  sessions=$(grep -c session.open "$work/a.log")
}
pull_cable() { ip link set a0 down; cut_us=${EPOCHREALTIME/./}; }
plug_cable() {
  ip link set a0 up
  ip -6 addr add fd77::1/64 dev a0 nodad 2>/dev/null || true
}
wait_pull() {
  code=0
  wait "$pull" || code=$?
  took=$(printf '%d.%03d s' $(((${EPOCHREALTIME/./} - cut_us) / 1000000)) $(((${EPOCHREALTIME/./} - cut_us) / 1000 % 1000)))
}
# The line of a log where something stands first.
line_of() { grep -n -m 1 -e "$1" "$2" | cut -d: -f1; }

echo "3. the cable is pulled out in the middle, and coordinator and source are gone"
start_pull cut
pull_cable
wait_pull
[ "$code" = 3 ] || fail "a pull without a network ended with $code, not 3 (not found)"
echo "   $took from the cut to: $(tail -n 1 "$work/cut.log" | cut -c1-200)"
tail -n 1 "$work/cut.log" | grep -q 'NO_SOURCE.*model\.layers\.' || fail "the error does not name what nobody holds"
reconnect=$(line_of 'pull.reconnect.*no byte for' "$work/cut.log") || fail "silence was not what ended the paths"
lost=$(line_of pull.source_lost "$work/cut.log") || fail "the source was not reported lost"
[ "$reconnect" -lt "$lost" ] || fail "the source was given up before it was tried again"
plug_cable
on_b "$rekindle" pull m@1 --to "$work/cut" --coordinator 10.77.0.1:7300 --json --quiet >"$work/again.json" 2>"$work/again.log" ||
  fail "the pull after the cut"
python3 - "$work/again.json" <<'PY' || fail "nothing was resumed"
import json, sys
answer = json.load(open(sys.argv[1]))
sys.exit(0 if answer["resumed_bytes"] > 0 and answer["resumed_bytes"] + answer["fetched_bytes"] == answer["bytes"] else 1)
PY
tensors_equal "$work/cut" || fail "bytes differ"

echo "4. the cable is out for a second and a half"
start_pull blip
pull_cable
sleep 1.5
plug_cable
wait_pull
[ "$code" = 0 ] || fail "the pull did not survive it: $code"
echo "   the pull went on and was done $took after the cut"
tensors_equal "$work/blip" || fail "bytes differ"

echo "5. the cable is pulled out, and a directory holds the rest"
start_pull fallback --fallback "$work/model"
pull_cable
wait_pull
[ "$code" = 0 ] || fail "the pull did not finish from the directory: $code"
echo "   done from the directory $took after the cut"
python3 - "$work/fallback.json" "$work/model" <<'PY' || fail "not finished from both"
import json, sys
sources = {source["name"]: source for source in json.load(open(sys.argv[1]))["sources"]}
sys.exit(0 if sources["a"]["bytes"] > 0 and sources["a"]["lost"] and sources[sys.argv[2]]["bytes"] > 0 else 1)
PY
tensors_equal "$work/fallback" || fail "bytes differ"
echo "all well"
