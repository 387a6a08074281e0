#include "recovery/device/device_wire.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <optional>
#include <span>
#include <utility>

#include "proto/worker.pb.h"
#include "recovery/rpc/convert.h"
#include "src/bucket/round_plan.h"
#include "src/tensor/checkpoint.h"

namespace rekindle::device {

namespace {

constexpr std::uint32_t kMostRanks = 4096;
constexpr int kMostCommunicators = 64;
constexpr std::size_t kLongestName = 128;
constexpr std::size_t kLongestId = 4096;
// Tiles of further runs are fetched instead.
constexpr std::size_t kMostKeptRuns = 16'384;
constexpr std::uint32_t kMostSlots = 64;

std::chrono::microseconds from_wire(std::uint64_t elapsed_us) {
  constexpr std::uint64_t kMost = std::numeric_limits<std::int64_t>::max();
  return std::chrono::microseconds(static_cast<std::int64_t>(std::min(elapsed_us, kMost)));
}

std::uint64_t to_wire(std::chrono::microseconds elapsed) {
  return static_cast<std::uint64_t>(std::max<std::int64_t>(0, elapsed.count()));
}

std::optional<Error> error_of(const proto::Status& status) {
  if (auto fine = rpc::from_status(status); !fine) return std::move(fine).error();
  return std::nullopt;
}

// Runs that are out of order or empty make all of them worthless.
std::vector<bucket::KeptTiles> kept_of(const proto::SpreadOver& over) {
  std::vector<bucket::KeptTiles> kept;
  for (const auto& run : over.kept()) {
    const bool follows = kept.empty() || kept.back().end <= run.begin();
    if (!follows || run.begin() >= run.end() || run.parts() > run.of()) return {};
    kept.push_back({run.begin(), run.end(), run.parts(), run.of()});
  }
  return kept;
}

bool is_name(const std::string& text) {
  return !text.empty() && text.size() <= kLongestName &&
         std::ranges::all_of(text, [](char c) { return c > 0x20 && c < 0x7f; });
}

Result<void> check_owners(const proto::BeginSpread& order) {
  const auto& owners = order.owners();
  if (owners.empty() || static_cast<std::uint32_t>(owners.size()) > order.ranks()) {
    return fail(ErrorCode::kInvalid, "{} owners of {} ranks", owners.size(), order.ranks());
  }
  std::vector<bool> seen(order.ranks());
  for (const std::uint32_t owner : owners) {
    if (owner >= order.ranks() || seen[owner]) {
      return fail(ErrorCode::kInvalid, "owner {} is none of {} ranks, or comes twice", owner,
                  order.ranks());
    }
    seen[owner] = true;
  }
  return {};
}

}  // namespace

Result<AttachedContents> parse_attached(std::string_view frame) {
  proto::AgentFrame parsed;
  if (!parsed.ParseFromArray(frame.data(), static_cast<int>(frame.size())) ||
      !parsed.has_attached()) {
    return fail(ErrorCode::kInvalid, "what a worker is attached to is malformed ({} bytes)",
                frame.size());
  }
  const auto& attached = parsed.attached();
  AttachedContents contents;
  if (const auto id = rpc::from_proto(attached.id()); id) contents.version = id->to_string();
  contents.tensor_set = attached.tensor_set();
  contents.layout = attached.layout();
  contents.segment_bytes.assign(attached.segment_bytes().begin(), attached.segment_bytes().end());
  for (const auto& box : attached.wanted()) {
    contents.wanted.push_back({box.tensor(),
                               {box.offset().begin(), box.offset().end()},
                               {box.extent().begin(), box.extent().end()}});
  }
  return contents;
}

std::uint64_t microseconds(Duration duration) {
  return to_wire(std::chrono::duration_cast<std::chrono::microseconds>(duration));
}

Result<SpreadOrder> from_proto(const proto::BeginSpread& order) {
  if (!is_name(order.communicator()) || order.id().size() > kLongestId) {
    return fail(ErrorCode::kInvalid, "a communicator's name of {} bytes, its id of {}",
                order.communicator().size(), order.id().size());
  }
  if (order.ranks() == 0 || order.ranks() > kMostRanks || order.rank() >= order.ranks()) {
    return fail(ErrorCode::kInvalid, "rank {} of {}", order.rank(), order.ranks());
  }
  TRY_VOID(check_owners(order));
  if (order.ranks_here() == 0 || order.ranks_here() > order.ranks()) {
    return fail(ErrorCode::kInvalid, "{} of {} ranks are here", order.ranks_here(), order.ranks());
  }
  if (order.keep_count() > order.ranks() ||
      (order.keep_count() > 0 && order.keep_index() >= order.keep_count())) {
    return fail(ErrorCode::kInvalid, "keeps bucket {} of each {}", order.keep_index(),
                order.keep_count());
  }
  const auto shares = static_cast<std::uint64_t>(order.owners_size());
  for (const std::uint32_t share : order.fetched()) {
    if (share < shares) continue;
    return fail(ErrorCode::kInvalid, "fetches share {} of {}", share, shares);
  }
  if (order.bucket_bytes() > bucket::kLargestBucket ||
      order.bucket_bytes() / shares < bucket::kSmallestShare) {
    return fail(ErrorCode::kInvalid, "buckets of {} bytes for {} owners", order.bucket_bytes(),
                shares);
  }
  TRY(auto pieces, rpc::from_proto(order.pieces(), std::numeric_limits<std::uint32_t>::max()));
  return SpreadOrder{order.session(),
                     order.communicator(),
                     order.id(),
                     order.rank(),
                     order.ranks(),
                     order.bucket_bytes(),
                     {order.owners().begin(), order.owners().end()},
                     order.keep_index(),
                     order.keep_count(),
                     order.owners_fetch(),
                     {order.fetched().begin(), order.fetched().end()},
                     std::move(pieces),
                     order.ranks_here()};
}

proto::BeginSpread to_proto(const SpreadOrder& order) {
  proto::BeginSpread message;
  message.set_session(order.session);
  message.set_communicator(order.communicator);
  message.set_id(order.id);
  message.set_rank(order.rank);
  message.set_ranks(order.ranks);
  message.set_bucket_bytes(order.bucket_bytes);
  for (const std::uint32_t owner : order.owners) message.add_owners(owner);
  message.set_keep_index(order.keep_index);
  message.set_keep_count(order.keep_count);
  message.set_owners_fetch(order.owners_fetch);
  for (const std::uint32_t share : order.fetched) message.add_fetched(share);
  if (!order.pieces.empty()) *message.mutable_pieces() = rpc::to_proto(order.pieces);
  message.set_ranks_here(order.ranks_here);
  return message;
}

Result<ShareWanted> from_proto(const proto::ShareWanted& wanted) {
  TRY(auto tiles, rpc::from_proto(wanted.tiles(), std::numeric_limits<TileIndex>::max()));
  return ShareWanted{wanted.session(), std::move(tiles)};
}

proto::ShareWanted to_proto(const ShareWanted& wanted) {
  proto::ShareWanted message;
  message.set_session(wanted.session);
  *message.mutable_tiles() = rpc::to_proto(wanted.tiles);
  return message;
}

Result<DeviceJoined> from_proto(const proto::DeviceJoined& joined) {
  const auto& names = joined.communicators();
  if (names.size() > kMostCommunicators || !std::ranges::all_of(names, is_name)) {
    return fail(ErrorCode::kInvalid, "names {} communicators, or one that is no name",
                names.size());
  }
  if (joined.bucket_bytes() < bucket::kPartAlignment ||
      joined.bucket_bytes() > bucket::kLargestBucket) {
    return fail(ErrorCode::kInvalid, "has buckets of {} bytes", joined.bucket_bytes());
  }
  return DeviceJoined{joined.session(),
                      joined.bucket_bytes(),
                      rpc::from_proto(joined.contents()),
                      joined.payload_bytes(),
                      {names.begin(), names.end()}};
}

proto::DeviceJoined to_proto(const DeviceJoined& joined) {
  proto::DeviceJoined message;
  message.set_session(joined.session);
  message.set_bucket_bytes(joined.bucket_bytes);
  *message.mutable_contents() = rpc::to_proto(joined.contents);
  message.set_payload_bytes(joined.payload_bytes);
  for (const auto& name : joined.communicators) message.add_communicators(name);
  return message;
}

SpreadOver from_proto(const proto::SpreadOver& over) {
  return {over.session(),
          error_of(over.error()),
          over.buckets(),
          over.bytes(),
          from_wire(over.elapsed_us()),
          from_wire(over.meet_us()),
          kept_of(over),
          over.kept_bytes(),
          error_of(over.worker_lost()),
          from_wire(over.verify_us()),
          over.more()};
}

proto::SpreadOver to_proto(const SpreadOver& over) {
  proto::SpreadOver message;
  message.set_session(over.session);
  if (over.error) *message.mutable_error() = rpc::to_status(*over.error);
  message.set_buckets(over.buckets);
  message.set_bytes(over.bytes);
  message.set_elapsed_us(to_wire(over.elapsed));
  message.set_meet_us(to_wire(over.meet));
  message.set_kept_bytes(over.kept_bytes);
  message.set_verify_us(to_wire(over.verify));
  message.set_more(over.more);
  if (over.worker_lost) *message.mutable_worker_lost() = rpc::to_status(*over.worker_lost);
  const std::size_t told = std::min(over.kept.size(), kMostKeptRuns);
  for (const auto& run : std::span(over.kept).first(told)) {
    auto& kept = *message.add_kept();
    kept.set_begin(run.begin);
    kept.set_end(run.end);
    kept.set_parts(run.parts);
    kept.set_of(run.of);
  }
  return message;
}

DeviceOver from_proto(const proto::DeviceServed& served) {
  return {served.session(), error_of(served.error()),       served.buckets(),
          served.bytes(),   from_wire(served.elapsed_us()), served.refilled()};
}

Result<std::string> from_proto(const proto::MeetingIdMade& made) {
  if (auto error = error_of(made.error())) return fail(std::move(*error));
  if (made.id().empty() || made.id().size() > kLongestId) {
    return fail(ErrorCode::kInvalid, "the device process makes a meeting's id of {} bytes",
                made.id().size());
  }
  return made.id();
}

proto::MeetingIdMade to_proto(std::uint64_t number, const Result<std::string>& id) {
  proto::MeetingIdMade message;
  message.set_number(number);
  if (id) {
    message.set_id(*id);
  } else {
    *message.mutable_error() = rpc::to_status(id.error());
  }
  return message;
}

proto::BlocksChecked to_proto(std::uint64_t number, const Result<std::vector<Digest>>& digests,
                              Duration elapsed) {
  proto::BlocksChecked message;
  message.set_number(number);
  message.set_elapsed_us(microseconds(elapsed));
  if (!digests) {
    *message.mutable_error() = rpc::to_status(digests.error());
    return message;
  }
  const auto bytes = std::as_bytes(std::span(*digests));
  message.set_digests(bytes.data(), bytes.size());
  return message;
}

Result<std::vector<Digest>> from_proto(const proto::BlocksChecked& checked) {
  if (auto error = error_of(checked.error())) return fail(std::move(*error));
  return parse_digests(checked.digests());
}

proto::BlockCopied to_copied(std::uint64_t number, Result<std::string> bytes) {
  proto::BlockCopied message;
  message.set_number(number);
  if (bytes) {
    message.set_data(std::move(*bytes));
  } else {
    *message.mutable_error() = rpc::to_status(bytes.error());
  }
  return message;
}

Result<std::string> from_proto(proto::BlockCopied copied) {
  if (auto error = error_of(copied.error())) return fail(std::move(*error));
  return std::move(*copied.mutable_data());
}

Result<SlotsOffered> from_proto(const proto::SlotsOffered& offered, UniqueFd memory) {
  SlotsOffered parsed;
  if (!memory || offered.slots() == 0 || offered.slots() > kMostSlots ||
      offered.bucket_bytes() < bucket::kPartAlignment ||
      offered.bucket_bytes() > bucket::kLargestBucket) {
    return fail(ErrorCode::kInvalid, "{} slots of {} bytes, {} a descriptor", offered.slots(),
                offered.bucket_bytes(), memory ? "with" : "without");
  }
  parsed.session = offered.session();
  parsed.bucket_bytes = offered.bucket_bytes();
  parsed.slots = offered.slots();
  parsed.contents = rpc::from_proto(offered.contents());
  parsed.memory = std::move(memory);
  return parsed;
}

Result<BucketWanted> from_proto(const proto::BucketWanted& wanted) {
  if (wanted.slot() >= kMostSlots) return fail(ErrorCode::kInvalid, "slot {}", wanted.slot());
  return BucketWanted{wanted.session(),
                      static_cast<std::size_t>(wanted.bucket()),
                      wanted.slot(),
                      wanted.verified(),
                      {wanted.wrong_tiles().begin(), wanted.wrong_tiles().end()}};
}

ReadsEnded from_proto(const proto::ReadsEnded& ended) {
  return {ended.session(), ended.all(), ended.buckets(), ended.why()};
}

proto::SlotsOffered to_proto(const SlotsOffered& offered) {
  proto::SlotsOffered message;
  message.set_session(offered.session);
  message.set_bucket_bytes(offered.bucket_bytes);
  message.set_slots(offered.slots);
  *message.mutable_contents() = rpc::to_proto(offered.contents);
  return message;
}

proto::BucketWanted to_proto(const BucketWanted& wanted) {
  proto::BucketWanted message;
  message.set_session(wanted.session);
  message.set_bucket(wanted.bucket);
  message.set_slot(wanted.slot);
  message.set_verified(wanted.verified);
  for (const TileIndex tile : wanted.wrong) message.add_wrong_tiles(tile);
  return message;
}

proto::ReadsEnded to_proto(const ReadsEnded& ended) {
  proto::ReadsEnded message;
  message.set_session(ended.session);
  message.set_all(ended.all);
  message.set_buckets(ended.buckets);
  message.set_why(ended.why);
  return message;
}

}  // namespace rekindle::device
