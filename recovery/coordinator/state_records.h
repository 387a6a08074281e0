#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "recovery/coordinator/core/durable_table.h"
#include "src/base/result.h"

namespace rekindle::coordinator {

// The durable state is a set of records, each under its own key. A store does not look into them:
// StateRecords gives them their meaning.
using Records = std::map<std::string, std::string>;
struct RecordWrite {
  std::string key;
  // nullopt: erased.
  std::optional<std::string> value;
};

void apply_writes(const std::vector<RecordWrite>& writes, Records& records);

// The place of the records. One thread at a time.
class DurableStore {
 public:
  virtual ~DurableStore() = default;
  // Names the store in a message: "/var/lib/rekindle/state".
  virtual std::string place() const = 0;
  // Empty when nothing was written yet. kCorrupt: the store is damaged. It is never reset silently.
  virtual Result<Records> load() = 0;
  // Returns once all of them would survive a power loss. After an error each key has its old or its
  // new value. kStale: another coordinator leads.
  virtual Result<void> write(const std::vector<RecordWrite>& writes) = 0;
};

// The writer number of this binary. A state may ask for a higher one (StateMeta.min_writer).
inline constexpr std::uint32_t kStateWriter = 1;

// The durable state as records (proto/state.proto). Data of a newer writer stays: unknown fields of
// a record that is written anew, and records under unknown keys.
class StateRecords {
 public:
  // kCorrupt names the record that is damaged. kInvalid: the state needs a newer writer.
  static Result<StateRecords> parse(Records records);

  const DurableState& state() const { return state_; }
  // The records to write for a change of the core. A store may split them, so their order matters:
  // a model's watermark comes before the erasure of the tombstones that it stands for.
  std::vector<RecordWrite> encode(const StateChange& change) const;
  // These records are durable now.
  void note(const std::vector<RecordWrite>& writes) { apply_writes(writes, records_); }

 private:
  std::string_view stored(const std::string& key) const;

  Records records_;
  // As parsed.
  DurableState state_;
};

}  // namespace rekindle::coordinator
