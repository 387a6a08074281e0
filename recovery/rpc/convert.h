#pragma once

#include <span>
#include <utility>
#include <vector>

#include "proto/common.pb.h"
#include "src/base/digest.h"
#include "src/base/ids.h"
#include "src/base/result.h"

// Conversions between wire messages and our own types. They check messages from the wire.
namespace rekindle::rpc {

proto::Digest to_proto(const Digest& digest);
Digest from_proto(const proto::Digest& digest);

proto::ModelVersion to_proto(const ModelVersion& id);
// Checks the name.
Result<ModelVersion> from_proto(const proto::ModelVersion& id);

proto::StatusCode to_proto(ErrorCode code);
proto::Status to_status(const Error& error);
proto::Status ok_status();
// Success for STATUS_OK; kInternal for an unknown code. Cuts the message to one line.
Result<void> from_status(const proto::Status& status);

// Ascending disjoint runs [begin, end), as TileSet::ranges() returns them.
using TileRuns = std::vector<std::pair<std::uint32_t, std::uint32_t>>;
proto::IndexRanges to_proto(std::span<const std::pair<std::uint32_t, std::uint32_t>> runs);
// kInvalid unless every run is non-empty, ascending, disjoint and ends by `limit`.
Result<TileRuns> from_proto(const proto::IndexRanges& ranges, std::uint64_t limit);

}  // namespace rekindle::rpc
