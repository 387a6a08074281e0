#include "recovery/joint/joint_publications.h"

#include <algorithm>
#include <utility>

#include <boost/asio/this_coro.hpp>

#include "recovery/rpc/convert.h"
#include "recovery/rpc/methods.h"

namespace rekindle::joint {

using async::Task;

namespace {

// Bounds what ranks, or other agents, can make this agent keep.
constexpr std::size_t kMostShares = 64;
constexpr std::uint32_t kMostRanks = 65'536;

}  // namespace

JointPublications::JointPublications(boost::asio::any_io_executor executor, JointAgent& agent)
    : executor_(executor), agent_(agent), tasks_(std::move(executor)) {}

void JointPublications::install(rpc::RpcServer& server) {
  rpc::handle<proto::AGENT_JOINT>(
      server, [this](rpc::Peer peer, proto::JointRequest request, const rpc::Events&) {
        return answer(std::move(peer), std::move(request));
      });
}

std::shared_ptr<JointShare> JointPublications::find(const ModelVersion& id) const {
  const auto found = std::ranges::find_if(
      shares_, [&](const auto& share) { return share->id() == id && !share->over(); });
  return found == shares_.end() ? nullptr : *found;
}

Task<Result<RankPlaces>> JointPublications::declare(ModelVersion id, std::uint32_t world,
                                                    Declaration declaration, std::uint64_t owner,
                                                    TimePoint give_up) {
  auto share = find(id);
  if (share == nullptr) {
    if (world == 0 || world > kMostRanks) {
      co_return fail(ErrorCode::kInvalid, "{}: a world of {} ranks; 1 to {} are allowed",
                     id.to_string(), world, kMostRanks);
    }
    if (shares_.size() >= kMostShares) {
      co_return fail(ErrorCode::kExhausted, "{} joint publications are under way on this host",
                     shares_.size());
    }
    share = std::make_shared<JointShare>(executor_, agent_, id, world, metrics_);
    shares_.push_back(share);
    tasks_.spawn("joint.share", run(share));
  }
  co_return co_await share->declare(world, std::move(declaration), owner, give_up);
}

Task<void> JointPublications::run(std::shared_ptr<JointShare> share) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  co_await share->run();
  shares_.remove(share);
}

Task<Result<Digest>> JointPublications::commit(ModelVersion id, std::uint32_t rank,
                                               std::uint64_t owner, store::FilledSegments filled,
                                               std::shared_ptr<void> files, TimePoint give_up) {
  const auto share = find(id);
  if (share == nullptr) {
    co_return fail(ErrorCode::kStale, "the publication of {} is over; publish it again",
                   id.to_string());
  }
  co_return co_await share->commit(rank, owner, std::move(filled), std::move(files), give_up);
}

void JointPublications::leave(const ModelVersion& id, std::uint32_t rank, std::uint64_t owner) {
  if (const auto share = find(id)) share->leave(rank, owner);
}

Task<Result<proto::JointResponse>> JointPublications::answer(rpc::Peer peer,
                                                             proto::JointRequest request) {
  CO_TRY(const ModelVersion id, rpc::from_proto(request.id()));
  const auto found = std::ranges::find_if(shares_, [&](const auto& share) {
    return share->id() == id && share->roster() == request.roster();
  });
  if (request.roster() == 0 || found == shares_.end()) {
    co_return fail(ErrorCode::kNotFound, "this agent does not take part in publication {} of {}",
                   request.roster(), id.to_string());
  }
  const auto share = *found;
  co_return co_await share->answer(std::move(peer), std::move(request));
}

Task<void> JointPublications::close(std::chrono::milliseconds deadline) {
  for (const auto& share : shares_) {
    share->end({ErrorCode::kUnavailable, "this agent stops; publish again"});
  }
  co_await tasks_.close(deadline);
}

}  // namespace rekindle::joint
