#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "recovery/coordinator/core/types.h"
#include "recovery/coordinator/durable_store.h"

namespace rekindle::coordinator {

// The writer number of this binary. A state may ask for a higher one (StateMeta.min_writer).
inline constexpr std::uint32_t kStateWriter = 1;

// The durable state as records (proto/state.proto). What a newer writer stored and this one does
// not know stays: unknown fields of a record that is written anew, and records under unknown keys.
class StateRecords {
 public:
  // kCorrupt names the record that is damaged. kInvalid: the state needs a newer writer.
  static Result<StateRecords> parse(Records records);

  const DurableState& state() const { return state_; }
  // The records to write for a change of the core. The order matters where a store splits them: a
  // model's watermark comes before the tombstones that it stands for are erased.
  std::vector<RecordWrite> encode(const StateChange& change) const;
  // They have become durable.
  void note(const std::vector<RecordWrite>& writes);

 private:
  std::string_view stored(const std::string& key) const;

  Records records_;
  DurableState state_;  // as parsed
};

}  // namespace rekindle::coordinator
