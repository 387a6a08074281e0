#!/usr/bin/env bash
# Who leads when only some of the hosts hear each other: three members of etcd, two coordinators, a source and a
# puller, each on a host of its own.
#   - only the leader is cut off from etcd: it stops to answer and steps down, the other one leads in a higher epoch,
#     the agents go to it, and the first one gives no stale answer, not even when it is asked directly;
#   - only the agents are cut off from the leader: it goes on to lead, `latest` does not go back, they come back;
#   - the leader is stopped (SIGSTOP): the other one leads, and the first one stands by when it goes on.
#   etcd_partition.sh REKINDLE-BINARY
set -euo pipefail
# shellcheck source=tests/net/hosts.sh
. "$(dirname "$0")/hosts.sh"
[ -x /usr/bin/etcd ] || {
  echo "no etcd here"
  exit 77
}
inside_namespaces "$0" "$@"
rekindle=$1

begin_work
make_hosts 7 0
make_model "$work/model1" 1 2
make_model "$work/model2" 2 2
etcd=http://10.78.0.1:2379,http://10.78.0.2:2379,http://10.78.0.3:2379
cluster=e0=http://10.78.0.1:2380,e1=http://10.78.0.2:2380,e2=http://10.78.0.3:2380
for member in 0 1 2; do
  here=http://10.78.0.$((member + 1))
  on "$member" /usr/bin/etcd --name "e$member" --data-dir "$work/etcd$member" --listen-client-urls "$here:2379" \
    --advertise-client-urls "$here:2379" --listen-peer-urls "$here:2380" --initial-advertise-peer-urls "$here:2380" \
    --initial-cluster "$cluster" --initial-cluster-state new --log-level warn >"$work/etcd$member.log" 2>&1 &
done

address() { echo "10.78.0.$(($1 + 1)):7300"; }
both=$(address 3),$(address 4)
declare -A pids
start_candidate() {
  # Not by on(): its process must be the coordinator itself, to be stopped.
  nsenter --net="/proc/${holders[$1]}/ns/net" "$rekindle" coordinator --listen "$(address "$1")" --etcd "$etcd" \
    --etcd-ttl 2s >"$work/coordinator$1.log" 2>&1 &
  pids[$1]=$!
}
count() { grep -c "$2" "$work/coordinator$1.log" || true; }
# wait_count HOST PATTERN LEAST
wait_count() {
  for _ in $(seq 300); do
    [ "$(count "$1" "$2")" -ge "$3" ] && return
    sleep 0.1
  done
  fail "coordinator $1 has not said '$2' $3 times"
}
# What a coordinator answers to a command on host 6: its epoch, or nothing.
epoch_of() {
  on 6 timeout 4 "$rekindle" status --coordinator "$1" --json 2>/dev/null |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["epoch"])' 2>/dev/null || true
}
# The state of the source, as the leader sees it.
source_state() {
  on 6 timeout 4 "$rekindle" status --coordinator "$both" --json 2>/dev/null |
    python3 -c 'import json, sys
for node in json.load(sys.stdin)["nodes"]: print(node["state"])' 2>/dev/null || true
}
wait_source() {
  for _ in $(seq 200); do
    [[ " $* " = *" $(source_state) "* ]] && return
    sleep 0.1
  done
  fail "the source is '$(source_state)', not $*"
}
cut_etcd() { for member in 0 1 2; do $1 "$2" $member && $1 $member "$2"; done; }
# Only m@2 has a second layer.
is_second() { head -c 4096 "$1"/*.safetensors | grep -q 'layers\.1\.mlp' || fail "m is not m@2"; }
gives_nothing() {
  for _ in 1 2 3; do
    local said
    said=$(epoch_of "$(address "$1")")
    [ -z "$said" ] || fail "coordinator $1 answers in epoch $said: it has been replaced"
  done
}

start_candidate 3
wait_count 3 coordinator.ready 1
start_candidate 4
wait_count 4 coordinator.standing_by 1
on 5 "$rekindle" agent --node-id source --listen 10.78.0.6:7400 --store "$work/store" --coordinator "$both" \
  >"$work/agent.log" 2>&1 &
wait_source alive
on 5 "$rekindle" publish m@1 "$work/model1" --store "$work/store" --quiet >"$work/publish.log" 2>&1 || fail publish
first=$(epoch_of "$both")

echo "only the leader is cut off from etcd"
cut_etcd lose 3
wait_count 3 coordinator.stopping 1
wait_count 4 coordinator.ready 1
gives_nothing 3
second=$(epoch_of "$both")
[ "${second:-0}" -gt "$first" ] || fail "epoch '$second' after $first"
wait_source alive
on 5 "$rekindle" publish m@2 "$work/model2" --store "$work/store" --quiet >"$work/publish.log" 2>&1 || fail publish
on 6 "$rekindle" pull m --to "$work/out" --coordinator "$both" --quiet >"$work/pull.log" 2>&1 || fail pull
is_second "$work/out"
grep -q "rekindle-epoch $second" "$work/store/agent/epoch" || fail "the agent has not kept epoch $second"
standing=$(count 3 coordinator.standing_by)
cut_etcd heal 3
wait_count 3 coordinator.standing_by "$standing"
gives_nothing 3

echo "only the agents are cut off from the leader"
lose 5 4
lose 4 5
wait_source dead
[ "$(epoch_of "$both")" = "$second" ] || fail "the leader has not gone on"
code=0
on 6 timeout 20 "$rekindle" pull m --to "$work/out2" --coordinator "$both" --quiet >"$work/pull.log" 2>&1 || code=$?
[ "$code" != 0 ] || fail "m was pulled from nobody"
grep -q 'm@2 is the newest version' "$work/pull.log" || fail "the newest version is not named"
heal 5 4
heal 4 5
wait_source alive
on 6 "$rekindle" pull m --to "$work/out3" --coordinator "$both" --quiet >"$work/pull.log" 2>&1 || fail pull
is_second "$work/out3"

echo "the leader is stopped"
ready=$(count 3 coordinator.ready)
kill -STOP "${pids[4]}"
wait_count 3 coordinator.ready $((ready + 1))
standing=$(count 4 coordinator.standing_by)
kill -CONT "${pids[4]}"
gives_nothing 4
wait_count 4 coordinator.standing_by $((standing + 1))
third=$(epoch_of "$both")
[ "${third:-0}" -gt "$second" ] || fail "epoch '$third' after $second"
wait_source alive
on 5 "$rekindle" retire m@2 --everywhere --coordinator "$both" >"$work/retire.log" 2>&1 || fail retire
echo passed
