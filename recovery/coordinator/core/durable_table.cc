#include "recovery/coordinator/core/durable_table.h"

#include <algorithm>
#include <utility>

namespace rekindle::coordinator {

namespace {

template <typename Map, typename Key>
const typename Map::mapped_type* find_in(const Map& map, const Key& key) {
  const auto found = map.find(key);
  return found == map.end() ? nullptr : &found->second;
}

std::uint64_t watermark(const DurableState& state, const std::string& model) {
  const auto* found = find_in(state.retired_through, model);
  return found == nullptr ? 0 : *found;
}

}  // namespace

void StateChange::apply_to(DurableState& state) const {
  if (epoch) state.epoch = *epoch;
  for (const auto& [id, version] : versions) {
    if (version) {
      state.versions[id] = *version;
    } else {
      state.versions.erase(id);
    }
  }
  for (const auto& [model, version] : retired_through) state.retired_through[model] = version;
  for (const auto& [node_id, is_drained] : drained) {
    if (is_drained) {
      state.drained.insert(node_id);
    } else {
      state.drained.erase(node_id);
    }
  }
}

std::uint64_t DurableTable::next_epoch() const {
  return staged_.epoch.value_or(writing_.epoch.value_or(state_.epoch));
}

std::optional<DurableVersion> DurableTable::next_version(const ModelVersion& id) const {
  if (const auto* staged = find_in(staged_.versions, id)) return *staged;
  if (const auto* writing = find_in(writing_.versions, id)) return *writing;
  const auto* durable = find_in(state_.versions, id);
  return durable == nullptr ? std::nullopt : std::optional(*durable);
}

bool DurableTable::next_drained(const std::string& node_id) const {
  if (const auto* staged = find_in(staged_.drained, node_id)) return *staged;
  if (const auto* writing = find_in(writing_.drained, node_id)) return *writing;
  return state_.drained.contains(node_id);
}

std::uint64_t DurableTable::next_retired_through(const std::string& model) const {
  if (const auto* staged = find_in(staged_.retired_through, model)) return *staged;
  if (const auto* writing = find_in(writing_.retired_through, model)) return *writing;
  return watermark(state_, model);
}

CommitNumber DurableTable::set_epoch(std::uint64_t epoch) {
  staged_.epoch = epoch;
  return next_number_;
}

CommitNumber DurableTable::set_version(const ModelVersion& id, const DurableVersion& version) {
  staged_.versions[id] = version;
  return next_number_;
}

CommitNumber DurableTable::erase_version(const ModelVersion& id) {
  staged_.versions[id] = std::nullopt;
  return next_number_;
}

CommitNumber DurableTable::set_retired_through(const std::string& model, std::uint64_t version) {
  staged_.retired_through[model] = version;
  return next_number_;
}

CommitNumber DurableTable::set_drained(const std::string& node_id, bool drained) {
  staged_.drained[node_id] = drained;
  return next_number_;
}

CommitNumber DurableTable::keep_version(const ModelVersion& id) {
  if (staged_.versions.contains(id)) return next_number_;
  if (writing_.versions.contains(id)) return writing_number_;
  if (!unsure_.versions.contains(id)) return 0;
  rewrite_ = true;
  return next_number_;
}

CommitNumber DurableTable::keep_drained(const std::string& node_id) {
  if (staged_.drained.contains(node_id)) return next_number_;
  if (writing_.drained.contains(node_id)) return writing_number_;
  if (!unsure_.drained.contains(node_id)) return 0;
  rewrite_ = true;
  return next_number_;
}

std::optional<CommitBatch> DurableTable::take_batch() {
  if (writing_number_ != 0 || (staged_.empty() && !rewrite_)) return std::nullopt;
  // Write the durable values over any trace of a failed batch.
  StateChange batch;
  if (unsure_.epoch) batch.epoch = state_.epoch;
  for (const auto& [id, ignored] : unsure_.versions) {
    const auto* durable = find_in(state_.versions, id);
    batch.versions[id] = durable == nullptr ? std::nullopt : std::optional(*durable);
  }
  for (const auto& [model, ignored] : unsure_.retired_through) {
    batch.retired_through[model] = watermark(state_, model);
  }
  for (const auto& [node_id, ignored] : unsure_.drained) {
    batch.drained[node_id] = state_.drained.contains(node_id);
  }
  if (staged_.epoch) batch.epoch = staged_.epoch;
  for (auto& [id, version] : staged_.versions) batch.versions[id] = std::move(version);
  for (const auto& [model, version] : staged_.retired_through) {
    batch.retired_through[model] = version;
  }
  for (const auto& [node_id, is_drained] : staged_.drained) batch.drained[node_id] = is_drained;
  staged_ = {};
  rewrite_ = false;
  writing_ = std::move(batch);
  writing_number_ = next_number_++;
  return CommitBatch{writing_number_, writing_};
}

DurableTable::Ended DurableTable::committed(CommitNumber number, bool durable) {
  Ended ended;
  if (number == 0 || number != writing_number_) return ended;
  ended.through = std::exchange(writing_number_, 0);
  const StateChange batch = std::exchange(writing_, {});
  if (durable) {
    batch.apply_to(state_);
    unsure_ = {};
    for (const auto& [id, ignored] : batch.versions) ended.changed.push_back(id);
    return ended;
  }
  unsure_ = batch;
  // Changes gathered behind it were judged by values that did not become durable.
  if (!staged_.empty() || rewrite_) ended.through = next_number_++;
  staged_ = {};
  rewrite_ = false;
  return ended;
}

}  // namespace rekindle::coordinator
