#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "src/base/result.h"

namespace rekindle::coordinator {

// The durable state is a set of records, each under its own key (state_records.h says what they
// are; a store does not look into them).
using Records = std::map<std::string, std::string>;
struct RecordWrite {
  std::string key;
  std::optional<std::string> value;  // nullopt: erased
};

// Where the records live. Used by one thread at a time.
class DurableStore {
 public:
  virtual ~DurableStore() = default;
  // None when nothing was written yet. kCorrupt for a damaged store: it is never reset silently.
  virtual Result<Records> load() = 0;
  // Returns once all of them would survive a power loss. After an error each key has its old or its
  // new value. kStale: another coordinator leads now.
  virtual Result<void> write(const std::vector<RecordWrite>& writes) = 0;
};

}  // namespace rekindle::coordinator
