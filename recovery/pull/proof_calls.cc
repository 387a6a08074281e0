#include "recovery/pull/proof_calls.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/post.hpp>

#include "recovery/pull/source_table.h"
#include "recovery/rpc/convert.h"

namespace rekindle::pull {

namespace {

constexpr int kCallsAtOnce = 16;  // per source
constexpr std::size_t kItemsPerCall = 1024;

}  // namespace

ProofCalls::ProofCalls(boost::asio::any_io_executor executor, std::shared_ptr<SourceTable> sources,
                       Digest root)
    : executor_(std::move(executor)), sources_(std::move(sources)), root_(root) {}

void ProofCalls::ask(transport::SourceIndex source, std::vector<planner::TileWork> items,
                     Done done) {
  auto call = std::make_shared<Call>(Call{std::move(items), std::move(done)});
  boost::asio::post(executor_, [self = shared_from_this(), source, call] {
    self->lines_[source].waiting.push_back(std::move(*call));
    self->start(source);
  });
}

void ProofCalls::close() {
  closed_ = true;
  for (const auto& [source, line] : lines_) start(source);
}

void ProofCalls::start(transport::SourceIndex source) {
  Line& line = lines_[source];
  while (!line.waiting.empty() && (closed_ || line.under_way < kCallsAtOnce)) {
    Call call = std::move(line.waiting.front());
    line.waiting.pop_front();
    if (closed_) {
      call.done(fail(ErrorCode::kUnavailable, "the transfer has ended"));
      continue;
    }
    ++line.under_way;
    boost::asio::co_spawn(executor_, run(shared_from_this(), source, std::move(call)),
                          boost::asio::detached);
  }
}

async::Task<void> ProofCalls::run(std::shared_ptr<ProofCalls> self, transport::SourceIndex source,
                                  Call call) {
  call.done(co_await self->fetch(source, std::move(call.items)));
  --self->lines_[source].under_way;
  self->start(source);
}

async::Task<RangeProofs> ProofCalls::fetch(transport::SourceIndex index,
                                           std::vector<planner::TileWork> items) {
  const ActiveSource& source = (*sources_)[index];
  if (source.peer == nullptr || !source.session || source.state.lost()) {
    co_return fail(ErrorCode::kUnavailable, "source {} has no session", source.name);
  }
  const auto peer = source.peer;
  std::vector<std::string> proofs;
  for (std::size_t begin = 0; begin < items.size(); begin += kItemsPerCall) {
    proto::ProveRangesRequest request;
    *request.mutable_root() = rpc::to_proto(root_);
    *request.mutable_layout() = peer->source().layout();
    if (!source.session) co_return fail(ErrorCode::kUnavailable, "its session has ended");
    request.set_token(source.session->token.to_bytes());
    for (std::size_t i = begin; i < std::min(items.size(), begin + kItemsPerCall); ++i) {
      auto* box = request.add_items();
      box->set_tile(items[i].tile);
      for (const auto value : items[i].box.offset.span()) box->add_offset(value);
      for (const auto value : items[i].box.extent.span()) box->add_extent(value);
    }
    CO_TRY(auto part, co_await peer->prove_ranges(std::move(request)));
    std::move(part.begin(), part.end(), std::back_inserter(proofs));
  }
  co_return proofs;
}

}  // namespace rekindle::pull
