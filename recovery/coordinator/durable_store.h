#pragma once

#include "recovery/coordinator/core/types.h"

namespace rekindle::coordinator {

// Where the durable state lives. Used from one thread.
class DurableStore {
 public:
  virtual ~DurableStore() = default;
  // An empty state when there is none yet. kCorrupt for a damaged one: it is never reset silently.
  virtual Result<DurableState> load() = 0;
  // After an error the old or the new state is there, whole. kStale: another coordinator leads now.
  virtual Result<void> save(const DurableState& state) = 0;
};

}  // namespace rekindle::coordinator
