#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "src/base/result.h"

namespace rekindle::coordinator {

// The durable state is a set of records, each under its own key. A store does not look into them;
// state_records.h defines them.
using Records = std::map<std::string, std::string>;
struct RecordWrite {
  std::string key;
  // nullopt: erased.
  std::optional<std::string> value;
};

// The place of the records. One thread at a time.
class DurableStore {
 public:
  virtual ~DurableStore() = default;
  // Empty when nothing was written yet. kCorrupt: the store is damaged. It is never reset silently.
  virtual Result<Records> load() = 0;
  // Returns once all of them would survive a power loss. After an error each key has its old or its
  // new value. kStale: another coordinator leads.
  virtual Result<void> write(const std::vector<RecordWrite>& writes) = 0;
};

}  // namespace rekindle::coordinator
