#!/usr/bin/env bash
# Rows 27 and 55: a coordinator, a source, a puller, each on a host of its own, and packets that are lost in
# silence between two of them, in one direction or both. Pulls go on; who was cut off is found to be, and comes
# back by itself when packets pass again.
#   partition.sh REKINDLE-BINARY
set -euo pipefail
# shellcheck source=tests/net/hosts.sh
. "$(dirname "$0")/hosts.sh"
inside_namespaces "$0" "$@"
rekindle=$1

begin_work
make_hosts 3 100
make_model "$work/model" 10  # about 7 s
coordinator=10.78.0.1:7300
on 0 "$rekindle" coordinator --listen "$coordinator" --state "$work/state" >"$work/coordinator.log" 2>&1 &
start_agent 1
"$rekindle" publish m@1 "$work/model" --store "$work/store1" --quiet >"$work/publish.log" 2>&1 || fail publish

# How often a host has registered.
registered() { grep -c "node.registered node=host$1 " "$work/coordinator.log" || true; }
state_of() {
  on 0 "$rekindle" status --coordinator "$coordinator" --json | python3 -c '
import json, sys
for node in json.load(sys.stdin)["nodes"]:
    if node["node"] == sys.argv[1]:
        print(node["state"])' "host$1"
}
# wait_for_state HOST STATE...: any of them
wait_for_state() {
  local state
  for _ in $(seq 150); do
    state=$(state_of "$1")
    [[ " ${*:2} " = *" $state "* ]] && return
    sleep 0.1
  done
  fail "host $1 is '$state', not ${*:2}"
}

# name, then who loses what: pairs of hosts.
cut_while_pulling() {
  local name=$1 pair
  shift
  start_agent 2
  local before1 before2
  before1=$(registered 1)
  before2=$(registered 2)
  pull 2 &
  local pulling=$!
  sleep 1.5
  for pair in "$@"; do lose "${pair%-*}" "${pair#*-}"; done
  wait_for_state "$lost" "$seen_as"
  [ -e "$work/done2" ] && fail "$name: the pull was over before anything was cut"
  wait "$pulling" || fail "$name: the pull"
  right_copy "$work/model" "$work/store2" || fail "$name: bytes differ"
  for pair in "$@"; do heal "${pair%-*}" "${pair#*-}"; done
  wait_for_state "$lost" alive flapping  # who was dead twice within a minute
  echo "$name: the pull went on, and host $lost is back (registered $before1, $before2 -> $(registered 1), $(registered 2) times)"
  kill_agents 2
}

lost=2 seen_as=dead
cut_while_pulling "what the puller sends to the coordinator is lost" 2-0
cut_while_pulling "what the coordinator sends to the puller is lost" 0-2
cut_while_pulling "puller and coordinator do not reach each other" 2-0 0-2
# The puller, which goes on reading from it, vouches for it.
lost=1 seen_as=suspect
cut_while_pulling "source and coordinator do not reach each other" 1-0 0-1
