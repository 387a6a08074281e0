#pragma once

#include "recovery/coordinator/leader_term.h"

namespace rekindle::coordinator {

// Runs one of several coordinators that share an etcd. It stands by, without a socket, until it
// wins the election, leads until `told` is set or its lease is over, and stands by again. A leader
// whose lease etcd has not confirmed in time answers UNAVAILABLE and steps down: another one may
// lead.
async::Task<Result<void>> stand_and_lead(const TermOptions& options, Stop& told);

}  // namespace rekindle::coordinator
