#!/usr/bin/env bash
# Broadcast rounds between hosts: two hosts with the version and no worker, two with a worker each, on shaped links.
# Each byte leaves the hosts that have it once, not once for each worker. Then again, and one of the two is cut off
# amid the round: the workers' hosts take its bytes from the other one. Then both are cut off: the round ends, and
# the workers get the version when the hosts are back. The devices are doubles, so what NCCL would bring crosses no
# link here.
#   rounds.sh REKINDLE-BINARY DEVICE-CLIENT [MEGABITS-PER-SECOND]
set -euo pipefail
# shellcheck source=tests/net/hosts.sh
. "$(dirname "$0")/hosts.sh"
inside_namespaces "$0" "$@"
rekindle=$1
client=$2
mbit=${3:-120}
tensors=24
bytes=$((tensors * 2 * 1024 * 1024))

begin_work
make_hosts 5 "$mbit"
coordinator=10.78.0.5:7300
on 4 "$rekindle" coordinator --listen "$coordinator" --state "$work/state" >"$work/coordinator.log" 2>&1 &
for host in 0 1; do start_agent "$host" --gpu none; done
for host in 2 3; do start_agent "$host" --gpu double:1 --keep-rate 1000TB; done

publish() {
  make_model "$work/model$1" "$tensors" 2
  for host in 0 1; do
    "$rekindle" publish "m@$1" "$work/model$1" --store "$work/store$host" --quiet >"$work/publish.log" 2>&1 ||
      fail "publish m@$1 on host $host"
  done
}

# A worker on each of the hosts 2 and 3, told by lines of a FIFO.
start_worker() {
  mkfifo "$work/orders$1"
  # Not by on(): its process must be the worker itself.
  REKINDLE_STORE=$work/store$1 REKINDLE_DEVICE=double:0 nsenter --net="/proc/${holders[$1]}/ns/net" \
    "$client" "$work/orders$1" >"$work/answers$1.log" 2>"$work/worker$1.log" &
  answered[$1]=0
}
tell() { echo "$2" >&"$((10 + $1))"; }
# The next answer of worker $1 is $answer.
next_answer() {
  answered[$1]=$((answered[$1] + 1))
  for _ in $(seq 1200); do
    answer=$(sed -n "${answered[$1]}p" "$work/answers$1.log")
    [ -n "$answer" ] && break
    sleep 0.05
  done
}
is_ok() { [[ $answer = *'"code":"OK"'* ]]; }
answer_of() {
  next_answer "$1"
  is_ok || fail "the worker of host $1: '$answer'"
}
ask() {
  tell "$1" "$2"
  answer_of "$1"
}
attach_words() { echo "attach m@$2 group=g instance=i$1 bucket=1048576 generation=$3"; }

publish 1
declare -A answered
for host in 2 3; do
  start_worker "$host"
  eval "exec $((10 + host))>\"\$work/orders$host\""
  ask "$host" connect
  ask "$host" "$(attach_words "$host" 1 1)"
  ask "$host" "take all"
  ask "$host" loaded
  tell "$host" wait
done

# update VERSION: all workers attach to it; `amid` is run once it is under way.
begin_update() {
  local host
  on 4 "$rekindle" update "m@$1" --group g --coordinator "$coordinator" --json --quiet \
    >"$work/update.json" 2>"$work/update.log" &
  updating=$!
  for host in 2 3; do
    answer_of "$host"
    tell "$host" "$(attach_words "$host" "$1" "$1")"
  done
  for host in 2 3; do answer_of "$host"; done
  for host in 2 3; do tell "$host" "take all"; done
}
update() {
  local host
  begin_update "$1"
  amid
  for host in 2 3; do answer_of "$host"; done
  for host in 2 3; do tell "$host" loaded; done
  for host in 2 3; do answer_of "$host"; done
  wait "$updating" || fail "update m@$1: $(cat "$work/update.log")"
  python3 - "$work/update.json" <<'PY' || fail "not all workers came by broadcast: $(cat "$work/update.json")"
import json, sys
members = json.load(open(sys.argv[1]))["members"]
sys.exit(0 if len(members) == 2 and all(
    m["state"] == "ready" and m["spread_bytes"] == m["bytes"] > 0 for m in members) else 1)
PY
}
# The copy of a host is completed after the update. It has the bytes of the checkpoint, and the worker has the same.
right_bytes() {
  local host
  for host in 2 3; do
    for _ in $(seq 600); do
      compgen -G "$work/store$host/models/m@$1/*/rekindle.manifest" >/dev/null && break
      sleep 0.1
    done
    mkdir -p "$work/only$host-$1/models"
    ln -s "$work/store$host/models/m@$1" "$work/only$host-$1/models/m@$1"
    right_copy "$work/model$1" "$work/only$host-$1" || fail "bytes of m@$1 on host $host differ"
  done
}

publish 2
amid() { :; }
sent=$(($(sent_by 0) + $(sent_by 1)))
update 2
right_bytes 2
sent=$(($(sent_by 0) + $(sent_by 1) - sent))
echo "two hosts updated: the sources sent $((sent >> 20)) MiB, $((sent * 100 / bytes)) % of the version"
[ $((sent * 4)) -le $((bytes * 5)) ] || fail "the sources sent more than 1.25 times the version"

publish 3
for host in 2 3; do tell "$host" wait; done
amid() {
  sleep 1
  for host in 2 3; do
    lose 1 "$host"
    lose "$host" 1
  done
}
update 3
right_bytes 3
echo "one of two sources was cut off amid the round, and both workers came by broadcast"

publish 4
for host in 2 3; do tell "$host" wait; done
begin_update 4
sleep 1
for host in 2 3; do
  for source in 0 1; do
    lose "$source" "$host"
    lose "$host" "$source"
  done
done
for _ in $(seq 400); do
  grep -q "cannot fetch its share" "$work/coordinator.log" && break
  sleep 0.05
done
grep -q "cannot fetch its share" "$work/coordinator.log" || fail "the round did not end without a source"
for host in 2 3; do
  for source in 0 1; do
    heal "$source" "$host"
    heal "$host" "$source"
  done
done
generation=4
for host in 2 3; do
  for _ in $(seq 60); do
    next_answer "$host"
    is_ok && break
    # Its pull had given up before the hosts were back.
    generation=$((generation + 1))
    tell "$host" "$(attach_words "$host" 4 $generation)"
    next_answer "$host"
    sleep 0.5
    tell "$host" "take all"
  done
  is_ok || fail "the worker of host $host: '$answer'"
done
for host in 2 3; do ask "$host" loaded; done
wait "$updating" || fail "update m@4: $(cat "$work/update.log")"
right_bytes 4
echo "both sources were cut off amid a round, which ended; the workers got the version when they were back"
