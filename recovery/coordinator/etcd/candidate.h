#pragma once

#include "recovery/coordinator/reign.h"

namespace rekindle::coordinator {

// One of several coordinators that share an etcd: stands by, without a socket, until it is the one
// that leads; leads until `told` is set or another one does; stands by again. While etcd is away a
// leader goes on and nobody else begins to lead: only what has to be durable is refused
// (UNAVAILABLE).
rpc::Task<Result<void>> stand_and_lead(const ReignOptions& options, Stop& told);

}  // namespace rekindle::coordinator
