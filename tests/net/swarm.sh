#!/usr/bin/env bash
# Eight hosts at one link speed, one of them with a copy: seven join at once and fill each other. Then again,
# and half of them are killed on the way. Fails when bytes are wrong, a pull does not end well or the source sent
# more than 1.5 times the checkpoint; how long it took is printed only, beside a single pull of the same run.
#   swarm.sh REKINDLE-BINARY [MEGABITS-PER-SECOND [TENSORS-OF-2-MIB [ROUNDS]]]
set -euo pipefail
# shellcheck source=tests/net/hosts.sh
. "$(dirname "$0")/hosts.sh"
inside_namespaces "$0" "$@"
rekindle=$1
mbit=${2:-120}
tensors=${3:-128}
rounds=${4:-1}
joiners=7

begin_work
make_hosts $((joiners + 1)) "$mbit"
make_model "$work/model" "$tensors" 2 # what is verified alone can be traded alone: small pieces for a small model
bytes=$((tensors * 2 * 1024 * 1024))
coordinator=10.78.0.1:7300
on 0 "$rekindle" coordinator --listen "$coordinator" --state "$work/state" >"$work/coordinator.log" 2>&1 &
start_agent 0
"$rekindle" publish m@1 "$work/model" --store "$work/store0" --quiet >"$work/publish.log" 2>&1 || fail publish

millis() { printf '%d.%03d s' $(($1 / 1000000)) $(($1 / 1000 % 1000)); }
percent() { echo $(($1 * 100 / $2)); }

one_joiner() {
  start_agent 1
  local begun
  begun=$(now_us)
  pull 1 || fail "the single pull"
  alone=$(($(cat "$work/done1") - begun))
  right_copy "$work/model" "$work/store1" || fail "bytes of the single pull differ"
  echo "one joiner: $((bytes >> 20)) MiB at $mbit Mbit/s in $(millis "$alone")"
  kill_agents 1
}

begin_pulls() {
  local host
  for host in $(seq $joiners); do start_agent "$host"; done
  begun=$(now_us)
  pulls=()
  for host in $(seq $joiners); do
    pull "$host" &
    pulls[host]=$!
  done
}

seven_at_once() {
  local host took last=0 sent egress
  sent=$(sent_by 0)
  begin_pulls
  for host in $(seq $joiners); do wait "${pulls[$host]}" || fail "the pull of host $host"; done
  egress=$(($(sent_by 0) - sent))
  for host in $(seq $joiners); do
    took=$(($(cat "$work/done$host") - begun))
    [ "$took" -gt "$last" ] && last=$took
    right_copy "$work/model" "$work/store$host" || fail "bytes on host $host differ"
  done
  echo "seven at once: the last one after $(millis "$last"), $(percent "$last" "$alone") % of one joiner alone;" \
    "the source sent $((egress >> 20)) MiB, $(percent "$egress" "$bytes") % of the checkpoint"
  [ $((egress * 2)) -le $((bytes * 3)) ] || fail "the source sent more than 1.5 times the checkpoint"
  kill_agents $(seq $joiners)
}

half_killed() {
  local host took last=0
  begin_pulls
  sleep "$(awk "BEGIN { print $alone / 2000000 }")"
  for host in 4 5 6 7; do
    [ -e "$work/done$host" ] && fail "host $host was done before it could be killed"
  done
  kill_agents 4 5 6 7
  for host in 1 2 3; do
    wait "${pulls[$host]}" || fail "the pull of host $host, which lives"
    took=$(($(cat "$work/done$host") - begun))
    [ "$took" -gt "$last" ] && last=$took
    right_copy "$work/model" "$work/store$host" || fail "bytes on host $host differ"
  done
  for host in 4 5 6 7; do
    wait "${pulls[$host]}" && fail "the pull of host $host succeeded, whose agent was killed"
    compgen -G "$work/store$host/models/*/*/rekindle.manifest" >/dev/null && fail "host $host activated a part"
  done
  echo "four of seven killed half-way: the others after $(millis "$last"), $(percent "$last" "$alone") % of one joiner alone"
  kill_agents 1 2 3
}

for round in $(seq "$rounds"); do
  [ "$rounds" -gt 1 ] && echo "round $round"
  # New hosts for each step: one that died twice within a minute is offered last (flapping).
  for step in one_joiner seven_at_once half_killed; do
    life=.$round.$step
    $step
  done
done
