#pragma once

#include "recovery/rpc/notifier.h"

namespace rekindle::worker {

using rpc::Notifier;

}  // namespace rekindle::worker
