#pragma once

#include "recovery/coordinator/leader_term.h"

namespace rekindle::coordinator {

// One of several coordinators that share an etcd: stands by, without a socket, until it is the one
// that leads; leads until `told` is set or another one does; stands by again. A leader that etcd
// has not confirmed for as long as its lease lasts answers nobody any more (UNAVAILABLE) and steps
// down: another one may lead by then.
async::Task<Result<void>> stand_and_lead(const TermOptions& options, Stop& told);

}  // namespace rekindle::coordinator
