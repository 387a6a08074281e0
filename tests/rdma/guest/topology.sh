# shellcheck shell=bash
# RDMA devices of the emulated machine, the cables between them, and what may happen to both. For scripts that
# run inside it:  . "$REKINDLE_RDMA_GUEST/topology.sh"   (other programs call the command guest/lab)
#
# A cable N joins the devices rxaN (10.10.N.1) and rxbN (10.10.N.2): soft-RoCE over the two ends aN and bN of a
# veth pair. SIDE is a or b. All devices live in the initial network namespace, as soft-RoCE wants it
# (elsewhere it never receives); processes may live in others and use them (see add_host).

lab_state=/run/lab # cables: how many; undo/N: what was done to cable N, as commands that undo it
lab_table=4791

lab_fail() {
  echo "lab: $*" >&2
  return 1
}

# lab_wait_active DEVICE…: until their ports are up and have the GID of an IPv4 address, which is one of the
# first few: a port has 1,024, and to read them all takes seconds.
lab_wait_active() {
  local device n
  for device; do
    for ((n = 0; ; n++)); do
      lab_active "$device" && break
      ((n < 200)) || { lab_fail "$device has no active port with an IPv4 GID after 10 s"; return; }
      sleep 0.05
    done
  done
}
lab_active() {
  local port=/sys/class/infiniband/$1/ports/1 n gid
  [[ $(<"$port/state") == *ACTIVE* ]] || return
  for n in {0..7}; do
    read -r gid <"$port/gids/$n" && [[ $gid == 0000:0000:0000:0000:0000:ffff:* ]] && return
  done
  return 1
}

# one_device [MTU]: rxe0 at 10.9.0.1, which answers itself. The fastest; nothing to cut.
one_device() {
  ip link add d0 mtu "${1:-4200}" type dummy && ip addr add 10.9.0.1/24 dev d0 && ip link set d0 up &&
    rdma link add rxe0 type rxe netdev d0 && lab_wait_active rxe0 || return
  export REKINDLE_RDMA_A=rxe0 REKINDLE_RDMA_B=rxe0
}

# cables N [MTU]. An MTU of 4200 carries RoCE's 4096 and its headers.
#
# Both ends are addresses of this host, and Linux would hand a packet for itself over by lo, where no
# soft-RoCE device sees it. So the table `local` is asked last, and what this host sends looks first into
# a table with one route per direction of each cable.
cables() {
  local count=$1 mtu=${2:-4200} n side
  mkdir -p $lab_state/undo
  echo "$count" >$lab_state/cables
  for n in all default; do
    echo 0 >/proc/sys/net/ipv4/conf/$n/rp_filter
    echo 1 >/proc/sys/net/ipv4/conf/$n/accept_local
    echo 1 >/proc/sys/net/ipv4/conf/$n/arp_ignore # each end answers for its own address only
    echo 2 >/proc/sys/net/ipv4/conf/$n/arp_announce
  done
  ip rule add pref 300 lookup local && ip rule del pref 0 && ip rule add pref 200 iif lo lookup $lab_table || return
  REKINDLE_RDMA_A='' REKINDLE_RDMA_B=''
  for ((n = 0; n < count; n++)); do
    ip link add "a$n" mtu "$mtu" type veth peer name "b$n" mtu "$mtu" && lab_wire "$n" || return
    for side in a b; do rdma link add "rx$side$n" type rxe netdev "$side$n" || return; done
    REKINDLE_RDMA_A+=${REKINDLE_RDMA_A:+,}rxa$n REKINDLE_RDMA_B+=${REKINDLE_RDMA_B:+,}rxb$n
  done
  for ((n = 0; n < count; n++)); do lab_wait_active "rxa$n" "rxb$n" || return; done
  export REKINDLE_RDMA_A REKINDLE_RDMA_B REKINDLE_RDMA_LAB=$REKINDLE_RDMA_GUEST/lab
}

# lab_wire N [A-ADDRESS B-ADDRESS]: both ends up, with these addresses, and the routes between them, which
# are gone when an end was down. An address that is already there keeps its GID.
lab_wire() {
  local n=$1 a=${2:-10.10.$1.1} b=${3:-10.10.$1.2}
  ip -batch - <<END
    link set a$n up
    link set b$n up
    addr replace $a/24 dev a$n
    addr replace $b/24 dev b$n
    route replace $b dev a$n src $a table $lab_table
    route replace $a dev b$n src $b table $lab_table
END
}

# lab_undo N COMMAND…: notes how to undo what comes next.
lab_undo() {
  local count=0
  read -r count <$lab_state/cables
  (($1 < count)) || { lab_fail "there is no cable $1"; return; }
  echo "${@:2}" >>"$lab_state/undo/$1"
}
lab_sides() { if [ "$1" = both ]; then echo a b; else echo "$1"; fi; }

# cable_cut N [SIDE]: takes one end (b) down; the other end's port goes down with it. Taking the end down that
# requests leaves a queue pair that never completes in a tenth of all cases (soft-RoCE of Linux 6.1).
cable_cut() { lab_undo "$1" lab_wire "$1" && ip link set "${2:-b}$1" down; }

# cable_silence N [SIDE|both]: the port stays up, and what this side sends is lost. cable_lose N PERCENT [SIDE|both].
cable_silence() { cable_lose "$1" 100 "${2:-both}"; }
cable_lose() { lab_netem "$1" "${3:-both}" loss "$2%"; }
# cable_delay N MILLISECONDS [SIDE|both]: in the direction that leaves SIDE.
cable_delay() { lab_netem "$1" "${3:-both}" delay "$2ms" limit 100000; }
lab_netem() { # N SIDE ARGUMENT…
  local side
  for side in $(lab_sides "$2"); do
    lab_undo "$1" tc qdisc del dev "$side$1" root && tc qdisc replace dev "$side$1" root netem "${@:3}" || return
  done
}

# cable_filter N [SIDE|both]: as a firewall would, drops the RoCE packets (UDP 4791) that arrive at SIDE. All
# else passes.
cable_filter() {
  local side table=lab_$1
  lab_undo "$1" nft delete table inet "$table" || return
  {
    echo "add table inet $table"
    echo "add chain inet $table input { type filter hook input priority 0; }"
    for side in $(lab_sides "${2:-both}"); do echo "add rule inet $table input iifname $side$1 udp dport 4791 drop"; done
  } | nft -f -
}

# cable_readdress N SIDE [ADDRESS]: another address, so another GID (10.10.N.101 or .102); the cable works with it.
cable_readdress() {
  local n=$1 side=$2 number=1
  [[ $side == [ab] ]] || { lab_fail "no side '$side'"; return; }
  [ "$side" = a ] || number=2
  local old=10.10.$n.$number address=${3:-10.10.$n.10$number}
  lab_undo "$n" ip addr del "$address/24" dev "$side$n" && lab_undo "$n" lab_wire "$n" &&
    ip addr del "$old/24" dev "$side$n" || return
  if [ "$side" = a ]; then lab_wire "$n" "$address"; else lab_wire "$n" '' "$address"; fi
}

# cable_unroute N: side b is in another subnet (10.77.N.2), and nobody carries packets between the two. RoCE asks for
# a route by a given interface, and without one Linux takes every address to be on that link: so no one there answers.
cable_unroute() {
  local there=10.77.$1.2 table=lab_$1
  lab_undo "$1" nft delete table arp "$table" && cable_readdress "$1" b "$there" &&
    lab_undo "$1" ip neigh flush dev "a$1" && lab_undo "$1" ip neigh flush dev "b$1" || return
  {
    echo "add table arp $table"
    echo "add chain arp $table input { type filter hook input priority 0; }"
    echo "add rule arp $table input iifname { a$1, b$1 } drop"
  } | nft -f - && ip neigh flush dev "a$1" && ip neigh flush dev "b$1"
}

# cable_all FAULT [ARGUMENT…]: to every cable.
cable_all() {
  local n count=0
  read -r count <$lab_state/cables
  for ((n = 0; n < count; n++)); do "cable_$1" "$n" "${@:2}" || return; done
}

# cable_restore N|all: all of the above undone, ports active.
cable_restore() {
  local n file command
  local -A undone=()
  for file in "$lab_state"/undo/*; do
    n=${file##*/}
    [ -e "$file" ] && [[ $1 == all || $1 == "$n" ]] || continue
    while read -r command; do
      # The second of two equal ones has nothing to undo.
      [ -n "${undone[$command]-}" ] || $command || lab_fail "cable $n: $command"
      undone[$command]=1
    done <"$file"
    rm -f "$file"
    lab_wait_active "rxa$n" "rxb$n" || return
  done
}

# add_host NAME: a host of its own for processes: a network namespace with a control network, 10.1.0.1 for the
# first, .2, …, that reaches the other hosts and 10.1.0.254, the initial namespace. It sees all devices. Prints
# its address; for a host that is there already does nothing else.
add_host() {
  local index
  mkdir -p $lab_state/hosts
  if [ -e "$lab_state/hosts/$1" ]; then
    lab_address "$1"
    return
  fi
  if [ ! -e /sys/class/net/control ]; then
    ip link add control type bridge && ip addr add 10.1.0.254/24 dev control && ip link set control up || return
  fi
  cat /proc/sys/kernel/random/uuid >"$lab_state/hosts/$1"
  index=$(find $lab_state/hosts -type f | wc -l)
  ip netns add "$1" && ip link add "c$index" type veth peer name control netns "$1" || return
  ip link set "c$index" master control up
  ip -n "$1" link set lo up
  ip -n "$1" addr add "10.1.0.$index/24" dev control
  ip -n "$1" link set control up
  lab_address "$1"
}
lab_address() { ip -n "$1" -4 -o addr show dev control | sed -E 's/.* inet ([^/]*).*/\1/'; }
# on_host NAME COMMAND…: on that host, which has a boot_id of its own, too.
on_host() {
  # shellcheck disable=SC2016  # the inner shell expands it
  ${lab_exec-} ip netns exec "$1" sh -c 'mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"' \
    "$lab_state/hosts/$1" "${@:2}"
}

# with_memlock KIB COMMAND…: it may pin so much and no more, as a process of a user (root has no limit).
with_memlock() {
  ${lab_exec-} prlimit --memlock="$(($1 * 1024))" setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock -- "${@:2}"
}
