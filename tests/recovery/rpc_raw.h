#pragma once

#include "tests/recovery/rpc_fixture.h"
#include "tests/support/hostile_peer.h"

namespace rekindle::rpc::testing {

using RawPeer = HostilePeer;

}  // namespace rekindle::rpc::testing
