#include "recovery/joint/lead_link.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include <boost/asio/this_coro.hpp>

#include "recovery/rpc/convert.h"
#include "src/tensor/checkpoint.h"
#include "src/tensor/joint_declaration.h"
#include "src/tensor/signature_wire.h"

namespace rekindle::joint {

using async::Task;

namespace {

constexpr std::chrono::milliseconds kWatchWait{2000};

rpc::TileRuns runs_of(std::span<const TileIndex> tiles) {
  rpc::TileRuns runs;
  for (const TileIndex tile : tiles) {
    if (!runs.empty() && runs.back().second == tile) {
      ++runs.back().second;
    } else {
      runs.emplace_back(tile, tile + 1);
    }
  }
  return runs;
}

}  // namespace

Task<void> LeadLink::watch() {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  while (!course_.over() && !co_await async::is_cancelled()) {
    proto::JointRequest request = roster_.request();
    request.mutable_watch()->set_seen(static_cast<std::uint32_t>(state_.phase()));
    request.mutable_watch()->set_wait_ms(kWatchWait.count());
    auto answer = co_await roster_.lead().call(std::move(request));
    if (course_.over()) co_return;
    if (!answer) {
      co_return course_.end(
          std::move(answer).error().with_context(roster_.id.to_string() + ": its lead"));
    }
    state_ = answer->state();
    if (state_.phase() == proto::JOINT_ENDED) {
      auto why = rpc::from_status(state_.why());
      co_return course_.end(why ? Error(ErrorCode::kInternal, "ended") : std::move(why).error());
    }
    course_.notify();
    if (state_.phase() == proto::JOINT_COMPLETE) co_return;
  }
}

Task<Result<void>> LeadLink::reach(proto::JointPhase phase) {
  CO_TRY_VOID(co_await course_.wait_for([this, phase] { return state_.phase() >= phase; }));
  co_return Result<void>();
}

Digest LeadLink::root() const { return rpc::from_proto(state_.root()); }

std::vector<VersionSignature> LeadLink::signatures() const {
  return from_proto(state_.signatures());
}

// An ended publication takes no further step, whatever the lead has answered.
Task<Result<void>> LeadLink::call(proto::JointRequest request) {
  CO_TRY_VOID(co_await roster_.lead().call(std::move(request)));
  co_return course_.check();
}

Task<Result<void>> LeadLink::declare(std::string declarations) {
  for (std::uint64_t offset = 0; offset < declarations.size(); offset += kPageBytes) {
    proto::JointRequest request = roster_.request();
    auto& page = *request.mutable_declare();
    page.set_offset(offset);
    page.set_total_bytes(declarations.size());
    page.set_data(declarations.substr(offset, kPageBytes));
    CO_TRY_VOID(co_await call(std::move(request)));
  }
  co_return Result<void>();
}

Task<Result<std::vector<std::string>>> LeadLink::read_table() {
  std::vector<std::string> table;
  for (std::uint32_t host = 0; host < roster_.hosts.size(); ++host) {
    proto::JointRead read;
    read.set_kind(proto::JointRead::DECLARATIONS);
    read.set_of_host(host);
    CO_TRY(std::string blob, co_await this->read(std::move(read), kMaxJointDeclarationBytes));
    table.push_back(std::move(blob));
  }
  co_return table;
}

Task<Result<std::vector<Digest>>> LeadLink::read_leaves(std::uint64_t most) {
  return read_digests(proto::JointRead::LEAVES, most);
}

Task<Result<std::vector<Digest>>> LeadLink::read_layouts() {
  return read_digests(proto::JointRead::LAYOUTS, roster_.hosts.size());
}

Task<Result<std::vector<Digest>>> LeadLink::read_digests(proto::JointRead::Kind kind,
                                                         std::uint64_t most) {
  proto::JointRead read;
  read.set_kind(kind);
  CO_TRY(const std::string bytes, co_await this->read(std::move(read), most * sizeof(Digest)));
  co_return parse_digests(bytes);
}

// Every page brings bytes, so `most_bytes` bounds the number of calls.
Task<Result<std::string>> LeadLink::read(proto::JointRead read, std::uint64_t most_bytes) {
  std::string blob;
  while (true) {
    read.set_offset(blob.size());
    proto::JointRequest request = roster_.request();
    *request.mutable_read() = read;
    CO_TRY(const auto answer, co_await roster_.lead().call(std::move(request)));
    CO_TRY_VOID(course_.check());
    blob += answer.data();
    if (answer.total_bytes() > most_bytes || blob.size() > answer.total_bytes()) {
      co_return fail(ErrorCode::kCorrupt, "{}: {} sent {} of {} bytes, at most {} are allowed",
                     roster_.id.to_string(), roster_.lead().name(), blob.size(),
                     answer.total_bytes(), most_bytes);
    }
    if (blob.size() == answer.total_bytes()) co_return blob;
    if (answer.data().empty()) {
      co_return fail(ErrorCode::kCorrupt, "{}: {} sent an empty page", roster_.id.to_string(),
                     roster_.lead().name());
    }
  }
}

Task<Result<void>> LeadLink::put_leaves(std::span<const TileIndex> tiles,
                                        std::span<const Digest> leaves) {
  constexpr std::size_t kLeaves = kPageBytes / sizeof(Digest);
  while (!tiles.empty()) {
    const std::size_t count = std::min(kLeaves, tiles.size());
    proto::JointRequest request = roster_.request();
    auto& body = *request.mutable_leaves();
    *body.mutable_tiles() = rpc::to_proto(runs_of(tiles.first(count)));
    body.set_digests(std::string(digest_bytes(leaves.first(count))));
    CO_TRY_VOID(co_await call(std::move(request)));
    tiles = tiles.subspan(count);
    leaves = leaves.subspan(count);
  }
  co_return Result<void>();
}

Task<Result<void>> LeadLink::put_layout(std::optional<Digest> layout) {
  proto::JointRequest request = roster_.request();
  request.mutable_leaves()->set_last(true);
  if (layout) *request.mutable_leaves()->mutable_layout() = rpc::to_proto(*layout);
  co_return co_await call(std::move(request));
}

Task<Result<void>> LeadLink::confirm() {
  proto::JointRequest request = roster_.request();
  request.mutable_confirm();
  co_return co_await call(std::move(request));
}

Task<void> LeadLink::give_up(Error why) {
  proto::JointRequest request = roster_.request();
  *request.mutable_give_up()->mutable_why() = rpc::to_status(why);
  (void)co_await roster_.lead().try_once(std::move(request));
}

}  // namespace rekindle::joint
