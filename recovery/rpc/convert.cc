#include "recovery/rpc/convert.h"

#include <algorithm>
#include <string>

namespace rekindle::rpc {

namespace {

constexpr std::size_t kMaxStatusBytes = 4096;

// Text from the wire goes into logs and onto terminals: one line, no control characters.
std::string one_line(std::string_view text) {
  std::string line(text.substr(0, kMaxStatusBytes));
  std::replace_if(
      line.begin(), line.end(),
      [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }, ' ');
  return line;
}

}  // namespace

proto::Digest to_proto(const Digest& digest) {
  proto::Digest message;
  message.set_value(digest.to_bytes());
  return message;
}

Digest from_proto(const proto::Digest& digest) { return Digest::from_bytes(digest.value()); }

proto::ModelVersion to_proto(const ModelVersion& id) {
  proto::ModelVersion message;
  message.set_model(id.model);
  message.set_version(id.version);
  return message;
}

Result<ModelVersion> from_proto(const proto::ModelVersion& id) {
  TRY_VOID(check_model_name(id.model()));
  return ModelVersion{id.model(), id.version()};
}

proto::StatusCode to_proto(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalid:
      return proto::STATUS_INVALID;
    case ErrorCode::kNotFound:
      return proto::STATUS_NOT_FOUND;
    case ErrorCode::kTimeout:
      return proto::STATUS_TIMEOUT;
    case ErrorCode::kPeerLost:
      return proto::STATUS_PEER_LOST;
    case ErrorCode::kStale:
      return proto::STATUS_STALE;
    case ErrorCode::kCorrupt:
      return proto::STATUS_CORRUPT;
    case ErrorCode::kExhausted:
      return proto::STATUS_EXHAUSTED;
    case ErrorCode::kDenied:
      return proto::STATUS_DENIED;
    case ErrorCode::kUnavailable:
      return proto::STATUS_UNAVAILABLE;
    case ErrorCode::kInternal:
      return proto::STATUS_INTERNAL;
  }
  return proto::STATUS_INTERNAL;
}

proto::Status to_status(const Error& error) {
  proto::Status status;
  status.set_code(to_proto(error.code()));
  status.set_message(one_line(error.message()));
  return status;
}

proto::Status ok_status() { return {}; }

Result<void> from_status(const proto::Status& status) {
  const auto failed = [&](ErrorCode code) {
    return Failure(Error(code, one_line(status.message())));
  };
  switch (status.code()) {
    case proto::STATUS_OK:
      return {};
    case proto::STATUS_INVALID:
      return failed(ErrorCode::kInvalid);
    case proto::STATUS_NOT_FOUND:
      return failed(ErrorCode::kNotFound);
    case proto::STATUS_TIMEOUT:
      return failed(ErrorCode::kTimeout);
    case proto::STATUS_PEER_LOST:
      return failed(ErrorCode::kPeerLost);
    case proto::STATUS_STALE:
      return failed(ErrorCode::kStale);
    case proto::STATUS_CORRUPT:
      return failed(ErrorCode::kCorrupt);
    case proto::STATUS_EXHAUSTED:
      return failed(ErrorCode::kExhausted);
    case proto::STATUS_DENIED:
      return failed(ErrorCode::kDenied);
    case proto::STATUS_UNAVAILABLE:
      return failed(ErrorCode::kUnavailable);
    default:
      return failed(ErrorCode::kInternal);
  }
}

proto::IndexRanges to_proto(std::span<const std::pair<std::uint32_t, std::uint32_t>> runs) {
  proto::IndexRanges ranges;
  ranges.mutable_begin()->Reserve(static_cast<int>(runs.size()));
  ranges.mutable_end()->Reserve(static_cast<int>(runs.size()));
  for (const auto& [begin, end] : runs) {
    ranges.add_begin(begin);
    ranges.add_end(end);
  }
  return ranges;
}

Result<TileRuns> from_proto(const proto::IndexRanges& ranges, std::uint64_t limit) {
  if (ranges.begin_size() != ranges.end_size()) {
    return fail(ErrorCode::kInvalid, "index ranges have {} begins and {} ends", ranges.begin_size(),
                ranges.end_size());
  }
  TileRuns runs;
  runs.reserve(static_cast<std::size_t>(ranges.begin_size()));
  for (int i = 0; i < ranges.begin_size(); ++i) {
    const std::uint32_t begin = ranges.begin(i);
    const std::uint32_t end = ranges.end(i);
    if (begin >= end || end > limit || (!runs.empty() && begin < runs.back().second)) {
      return fail(ErrorCode::kInvalid, "index range [{}, {}) is empty, out of order or past {}",
                  begin, end, limit);
    }
    runs.emplace_back(begin, end);
  }
  return runs;
}

}  // namespace rekindle::rpc
