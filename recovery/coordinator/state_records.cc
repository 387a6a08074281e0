#include "recovery/coordinator/state_records.h"

#include <algorithm>
#include <set>
#include <utility>

#include "proto/state.pb.h"
#include "recovery/rpc/convert.h"
#include "src/base/version.h"

namespace rekindle::coordinator {

namespace {

constexpr const char* kMetaKey = "meta";
constexpr std::string_view kVersions = "versions/";
constexpr std::string_view kModels = "models/";
constexpr std::string_view kNodes = "nodes/";

std::string version_key(const ModelVersion& id) {
  return fmt::format("{}{}@{:020}", kVersions, id.model, id.version);
}
std::string model_key(const std::string& model) { return std::string(kModels) + model; }
std::string node_key(const std::string& node_id) { return std::string(kNodes) + node_id; }

template <typename Message>
Result<Message> parse_record(const std::string& key, std::string_view bytes) {
  Message message;
  if (!message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return fail(ErrorCode::kCorrupt, "the record '{}' is malformed", key);
  }
  return message;
}

// The record as stored, or a new one. parse() has read it once, so it is well-formed.
template <typename Message>
Message begin(std::string_view stored) {
  Message message;
  (void)message.ParseFromArray(stored.data(), static_cast<int>(stored.size()));
  return message;
}

// An equal digest stays as it was stored.
void set_digest(proto::Digest& field, const Digest& digest) {
  if (rpc::from_proto(field) != digest) field = rpc::to_proto(digest);
}

// Equal lists stay as they were stored.
void set_digests(google::protobuf::RepeatedPtrField<proto::Digest>& field,
                 const std::vector<Digest>& digests) {
  const auto same = [](const proto::Digest& stored, const Digest& digest) {
    return rpc::from_proto(stored) == digest;
  };
  if (std::ranges::equal(field, digests, same)) return;
  field.Clear();
  for (const Digest& digest : digests) *field.Add() = rpc::to_proto(digest);
}

std::string encode_version(std::string_view stored, const ModelVersion& id,
                           const DurableVersion& version) {
  auto record = begin<proto::VersionRecord>(stored);
  record.mutable_id()->set_model(id.model);
  record.mutable_id()->set_version(id.version);
  set_digest(*record.mutable_root(), version.root);
  set_digest(*record.mutable_tensor_set(), version.tensor_set);
  record.set_checkpoint_bytes(version.checkpoint_bytes);
  record.set_retiring(version.retiring);
  record.clear_replicas();
  if (version.replicas) record.set_replicas(*version.replicas);
  record.set_ready(version.ready);
  set_digests(*record.mutable_parts(), version.parts);
  record.set_announced(version.announced);
  return record.SerializeAsString();
}

Result<void> take_version(const std::string& key, std::string_view bytes, DurableState& state) {
  TRY(const auto record, parse_record<proto::VersionRecord>(key, bytes));
  auto id = rpc::from_proto(record.id());
  if (!id || version_key(*id) != key) {
    return fail(ErrorCode::kCorrupt, "the record '{}' is that of another version", key);
  }
  const Digest root = rpc::from_proto(record.root());
  if (root.is_nil()) {
    return fail(ErrorCode::kCorrupt, "the record '{}' has a root of {} bytes, not of {}", key,
                record.root().value().size(), root.bytes.size());
  }
  std::set<Digest> parts;
  for (const auto& part : record.parts()) {
    const Digest layout = rpc::from_proto(part);
    if (layout.is_nil()) {
      return fail(ErrorCode::kCorrupt, "the record '{}' has a part of {} bytes, not of {}", key,
                  part.value().size(), layout.bytes.size());
    }
    parts.insert(layout);
  }
  state.versions[std::move(*id)] = {
      root,
      rpc::from_proto(record.tensor_set()),
      record.checkpoint_bytes(),
      record.retiring(),
      record.has_replicas() ? std::optional(record.replicas()) : std::nullopt,
      record.ready(),
      {parts.begin(), parts.end()},
      record.announced()};
  return {};
}

Result<void> take_meta(const std::string& key, std::string_view bytes, DurableState& state) {
  TRY(const auto record, parse_record<proto::StateMeta>(key, bytes));
  if (record.min_writer() > kStateWriter) {
    const std::string writer =
        record.written_by().empty() ? "a newer release" : record.written_by().substr(0, 64);
    return fail(ErrorCode::kInvalid,
                "the state was written by {} and needs a coordinator with writer number {} or "
                "higher, this one ({}) has {}: start {}, or one as new; nothing was changed",
                writer, record.min_writer(), software_version(), kStateWriter, writer);
  }
  state.epoch = record.epoch();
  return {};
}

Result<void> take(const std::string& key, std::string_view bytes, DurableState& state) {
  if (key == kMetaKey) return take_meta(key, bytes, state);
  if (key.starts_with(kVersions)) return take_version(key, bytes, state);
  if (key.starts_with(kModels)) {
    TRY(const auto record, parse_record<proto::ModelRecord>(key, bytes));
    if (record.retired_through() > 0) {
      state.retired_through[record.model()] = record.retired_through();
    }
  } else if (key.starts_with(kNodes)) {
    TRY(const auto record, parse_record<proto::NodeRecord>(key, bytes));
    if (record.drained()) state.drained.insert(record.node_id());
  }
  // Other keys are those of a newer writer.
  return {};
}

}  // namespace

Result<StateRecords> StateRecords::parse(Records records) {
  StateRecords parsed;
  // The meta record says whether this binary may read the others.
  if (const auto meta = records.find(kMetaKey); meta != records.end()) {
    TRY_VOID(take(meta->first, meta->second, parsed.state_));
  }
  for (const auto& [key, bytes] : records) TRY_VOID(take(key, bytes, parsed.state_));
  parsed.records_ = std::move(records);
  return parsed;
}

std::string_view StateRecords::stored(const std::string& key) const {
  const auto found = records_.find(key);
  return found == records_.end() ? std::string_view() : std::string_view(found->second);
}

std::vector<RecordWrite> StateRecords::encode(const StateChange& change) const {
  std::vector<RecordWrite> writes;
  if (change.epoch) {
    auto record = begin<proto::StateMeta>(stored(kMetaKey));
    record.set_epoch(*change.epoch);
    record.set_written_by(std::string(software_version()));
    writes.push_back({kMetaKey, record.SerializeAsString()});
  }
  for (const auto& [model, version] : change.retired_through) {
    const std::string key = model_key(model);
    auto record = begin<proto::ModelRecord>(stored(key));
    record.set_model(model);
    record.set_retired_through(version);
    writes.push_back({key, record.SerializeAsString()});
  }
  for (const auto& [id, version] : change.versions) {
    const std::string key = version_key(id);
    if (version) {
      writes.push_back({key, encode_version(stored(key), id, *version)});
    } else {
      writes.push_back({key, std::nullopt});
    }
  }
  for (const auto& [node_id, drained] : change.drained) {
    const std::string key = node_key(node_id);
    auto record = begin<proto::NodeRecord>(stored(key));
    record.set_node_id(node_id);
    record.set_drained(drained);
    proto::NodeRecord plain;
    plain.set_node_id(node_id);
    // A node that is not drained needs no record, unless a newer writer stored other fields in it.
    if (!drained && record.ByteSizeLong() == plain.ByteSizeLong()) {
      writes.push_back({key, std::nullopt});
    } else {
      writes.push_back({key, record.SerializeAsString()});
    }
  }
  return writes;
}

void apply_writes(const std::vector<RecordWrite>& writes, Records& records) {
  for (const RecordWrite& write : writes) {
    if (write.value) {
      records[write.key] = *write.value;
    } else {
      records.erase(write.key);
    }
  }
}

}  // namespace rekindle::coordinator
