// PullJob: who is asked, and the plan over them.
#include <algorithm>
#include <utility>

#include <boost/asio/this_coro.hpp>

#include "recovery/pull/file_source.h"
#include "recovery/pull/pull.h"
#include "recovery/rpc/convert.h"
#include "src/async/offload.h"
#include "src/async/task_group.h"
#include "src/base/log.h"

namespace rekindle::pull {

namespace {

constexpr std::chrono::milliseconds kDialDeadline{1500};
constexpr std::chrono::milliseconds kRefreshDeadline{1000};
constexpr std::size_t kMissingShown = 5;
constexpr std::uint64_t kSlicesToTrade = 1024;
constexpr std::uint64_t kLeastSliceBytes = 1 << 20;

}  // namespace

// Connects to every listed source that is not connected yet, all at once.
async::Task<void> PullJob::connect_peers() {
  dialled_.clear();
  co_await dial_peers();
  co_await learn_layouts();
}

// The coordinator may be as silent as the sources: it is asked while those that are known are
// dialled again.
async::Task<void> PullJob::look_for_sources() {
  dialled_.clear();
  std::vector<async::Task<void>> both;
  both.push_back(dial_peers());
  both.push_back(ask_then_dial());
  co_await async::run_all(std::move(both));
  co_await learn_layouts();
}

async::Task<void> PullJob::ask_then_dial() {
  co_await finder_.refresh(silence_.at_most(kRefreshDeadline, std::chrono::steady_clock::now()));
  take_news_of_sources();
  co_await dial_peers();
}

async::Task<void> PullJob::dial_peers() {
  std::vector<async::Task<void>> dials;
  for (const auto& record : finder_.sources()) {
    if (sources_->size() + dials.size() >= transport::kMaxSources) break;
    const auto incarnation = Incarnation::from_bytes(record.node().incarnation());
    if (!incarnation || banned_.contains(*incarnation)) continue;
    const PeerKey key(*incarnation, rpc::from_proto(record.layout()));
    const bool connected =
        std::any_of(sources_->begin(), sources_->end(), [&](const ActiveSource& source) {
          return source.peer != nullptr && source.peer->incarnation() == key.first &&
                 rpc::from_proto(source.record.layout()) == key.second;
        });
    if (!connected && dialled_.insert(key).second) dials.push_back(dial_peer(record));
  }
  co_await async::run_all(std::move(dials));
}

async::Task<void> PullJob::dial_peer(proto::Source record) {
  const auto deadline = silence_.at_most(kDialDeadline, std::chrono::steady_clock::now());
  auto peer = co_await SourcePeer::connect(record, environment_.identity, deadline);
  if (!peer) {
    log::info("pull.dial", "source", record.node().node_id(), "error", peer.error());
    const auto incarnation = Incarnation::from_bytes(record.node().incarnation());
    if (incarnation && peer.error().code() == ErrorCode::kStale) banned_.insert(*incarnation);
    show({}, peer.error().message());
    co_return;
  }
  if (sources_->size() >= transport::kMaxSources) co_return;
  ActiveSource source;
  source.name = record.node().node_id();
  source.record = std::move(record);
  source.peer = std::move(*peer);
  sources_->push_back(std::move(source));
}

// Not while anybody dials: it holds on to elements of sources_.
async::Task<void> PullJob::learn_layouts() {
  if (checkpoint_ == nullptr) co_return;
  for (ActiveSource& source : *sources_) {
    if (source.peer == nullptr || source.layout != nullptr) continue;
    auto learned = co_await learn_layout_of(source);
    if (learned) continue;
    log::warn("pull.layout", "source", source.name, "error", learned.error());
    lose(source, learned.error());
  }
  forget_lost_sources();
}

async::Task<Result<void>> PullJob::learn_layout_of(ActiveSource& source) {
  const Digest digest = rpc::from_proto(source.record.layout());
  if (!layouts_.contains(digest)) {
    CO_TRY(const std::string bytes, co_await source.peer->fetch_layout(digest, paging()));
    CO_TRY(auto layout, Layout::parse(checkpoint_->tensors, bytes));
    if (layout.digest() != digest) {
      co_return fail(ErrorCode::kCorrupt, "source {} sent a layout with another digest",
                     source.name);
    }
    layouts_[digest] = std::make_shared<const Layout>(std::move(layout));
  }
  if (!source.record.complete()) {
    const TileIndex tiles = checkpoint_->tiles.tile_count();
    CO_TRY(const auto runs, rpc::from_proto(source.record.held(), tiles));
    source.held.emplace(tiles);
    for (const auto& [begin, end] : runs) source.held->set_range(begin, end);
  }
  source.layout = layouts_[digest];
  co_return Result<void>();
}

// A peer that did not answer in time may be asked again, a few times; one that answered nonsense is
// not.
void PullJob::lose(ActiveSource& source, const Error& cause) {
  source.lost = true;
  source.cause = cause.message();
  const bool unreachable = cause.code() == ErrorCode::kTimeout ||
                           cause.code() == ErrorCode::kPeerLost ||
                           cause.code() == ErrorCode::kUnavailable;
  const auto incarnation = source.peer->incarnation();
  if (!unreachable || ++losses_[incarnation] >= kLossesToBan) banned_.insert(incarnation);
}

// Copies of this version in the own store under other layouts.
void PullJob::add_local_sources() {
  for (const auto& stored : environment_.store->find(resolved_.id)) {
    if (stored->manifest.checkpoint->root != resolved_.root) continue;
    const std::string name = "store:" + stored->directory.filename().string();
    const bool known = std::any_of(sources_->begin(), sources_->end(),
                                   [&](const ActiveSource& source) { return source.name == name; });
    if (known || quarantined_.contains(name) || sources_->size() >= transport::kMaxSources)
      continue;
    ActiveSource source;
    source.name = name;
    source.layout = std::shared_ptr<const Layout>(stored, &stored->manifest.layout);
    for (const auto& segment : stored->segments) source.local_segments.push_back(segment->bytes());
    source.keep_alive = stored;
    sources_->push_back(std::move(source));
  }
}

async::Task<Result<void>> PullJob::add_fallback() {
  fallback_used_ = true;
  // It may be a slow file system, and everything in it may have to be digested.
  auto open = [this] {
    return checkpoint_ != nullptr
               ? open_file_source(request_.fallback, checkpoint_)
               : adopt_file_source(request_.fallback, resolved_.id, *environment_.digest_pool);
  };
  CO_TRY(auto files, co_await async::offload(*environment_.blocking_pool, std::move(open)));
  if (!resolved_.root.is_nil() && files->checkpoint->root != resolved_.root) {
    co_return fail(ErrorCode::kCorrupt, "{} holds other weights than {}: its root is {}, not {}",
                   request_.fallback.string(), resolved_.id.to_string(),
                   files->checkpoint->root.hex(), resolved_.root.hex());
  }
  checkpoint_ = files->checkpoint;
  ActiveSource source;
  source.name = request_.fallback.string();
  source.layout = files->layout;
  source.local_segments = files->segments();
  source.keep_alive = files;
  if (sources_->size() >= transport::kMaxSources) sources_->pop_back();
  sources_->push_back(std::move(source));
  co_return Result<void>();
}

// After a transfer. Wrong bytes add up over all transfers of this pull.
void PullJob::judge_sources() {
  grants_denied_ = false;
  for (auto& source : *sources_) {
    auto& wrong = wrong_slices_[source.name];
    wrong += source.wrong.slices;
    if (!source.quarantined && source.wrong.slices > 0 && wrong >= kWrongSlicesToQuarantine) {
      source.lost = source.quarantined = true;
      source.cause = wrong_bytes_cause(source.wrong.where);
      log::warn("pull.source_lost", "source", source.name, "cause", source.cause);
      show({}, fmt::format("source {} lost: {}", source.name, source.cause));
    }
    if (source.quarantined) quarantined_[source.name] = source.cause;
    if (source.peer == nullptr || !source.lost) continue;
    const auto incarnation = source.peer->incarnation();
    // Who delivers may be lost as often as the network likes: there is an end to that.
    if (source.bytes > 0) losses_.erase(incarnation);
    if (source.denied && !source.quarantined) {
      grants_denied_ = true;
      continue;
    }
    if (source.quarantined || ++losses_[incarnation] >= kLossesToBan) banned_.insert(incarnation);
  }
}

void PullJob::forget_lost_sources() {
  for (auto& source : *sources_) {
    if (source.lost && source.peer != nullptr) source.peer->close();
    // What is left starts afresh in the next transfer.
    source.session.reset();
    source.reconnects = 0;
    source.slow = false;
  }
  std::erase_if(*sources_, [](const ActiveSource& source) { return source.lost; });
}

// `growing_hold`: what sources that are being filled count as holding; null: all of their layout.
Result<std::unique_ptr<planner::Plan>> PullJob::plan_over(const TileSet* growing_hold) const {
  std::vector<planner::SourceView> views;
  for (const auto& source : *sources_) {
    views.push_back({source.layout.get(), source.held ? growing_hold : nullptr});
  }
  planner::PlanRequest request;
  request.checkpoint = checkpoint_.get();
  request.destination = &packed_->layout;
  request.sources = views;
  const TileSet have = verified_ != nullptr ? verified_->snapshot() : TileSet();
  request.have = verified_ != nullptr ? &have : nullptr;
  planner::PlanOptions options;
  if (environment_.share) {
    // What is small is traded in small pieces, or there would be too few of them.
    options.slice_bytes = std::clamp(packed_->layout.payload_bytes() / kSlicesToTrade,
                                     kLeastSliceBytes, options.slice_bytes);
    options.bucket_bytes = 4 * options.slice_bytes;
  }
  return planner::plan_pull(request, options);
}

// Slices are cut by what is held completely: sources that are being filled join in where they can
// (swarm::Availability). Only where those hold nothing that is left the others decide, by what they
// are going to hold.
Result<std::unique_ptr<planner::Plan>> PullJob::make_plan() {
  const TileSet nothing(checkpoint_->tiles.tile_count());
  TRY(auto plan, plan_over(&nothing));
  if (!any_growing() || plan->missing().empty() || plan->slice_count() > 0) return plan;
  return plan_over(nullptr);
}

Error PullJob::no_source_error(const planner::Plan& plan) const {
  bool all = false;
  auto missing = held_by_nobody(plan, all);
  missing.insert(missing.begin(), plan.missing().begin(), plan.missing().end());
  std::string quarantined;
  for (const auto& [name, why] : quarantined_) {
    quarantined += fmt::format("source {} is {}; ", name, why);
  }
  if (!quarantined.empty()) quarantined += "check its copy with `rekindle verify`; ";
  return {
      ErrorCode::kNotFound,
      fmt::format("NO_SOURCE: no living source holds {} part(s) of {}: {}; {}start an agent that "
                  "holds it, or give --fallback DIR",
                  missing.size(), resolved_.id.to_string(),
                  planner::describe_missing(*checkpoint_, missing, kMissingShown), quarantined)};
}

async::Task<Result<PlanSummary>> PullJob::plan_only() {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  CO_TRY_VOID(co_await resolve());
  CO_TRY_VOID(check_root());
  CO_TRY_VOID(co_await find_wanted());
  co_await connect_peers();
  add_local_sources();
  CO_TRY(const auto plan, make_plan());
  PlanSummary summary;
  summary.id = resolved_.id;
  summary.root = resolved_.root;
  summary.wanted_bytes = packed_->layout.payload_bytes();
  summary.wire_bytes = plan->wire_bytes();
  summary.slices = plan->slice_count();
  summary.buckets = plan->bucket_count();
  for (transport::SourceIndex i = 0; i < sources_->size(); ++i) {
    const ActiveSource& source = (*sources_)[i];
    PlanSummary::PerSource line{source.name, source.record.node().control_endpoint(), 0};
    for (transport::SliceIndex slice = 0; slice < plan->slice_count(); ++slice) {
      if (plan->candidates(slice).test(i)) line.bytes_available += plan->slice_bytes(slice);
    }
    summary.sources.push_back(std::move(line));
  }
  for (const auto& [tensor, box] : wanted_) {
    const TensorInfo& info = checkpoint_->tensors[tensor];
    summary.wanted.push_back({info.name, std::string(dtype_name(info.dtype)),
                              info.shape.to_string(), box.to_string(),
                              box.elements() * dtype_size_bytes(info.dtype)});
  }
  summary.tensors = count_tensors(checkpoint_->tensors, packed_->layout);
  for (const auto& missing : plan->missing()) {
    summary.missing.push_back(checkpoint_->tensors[missing.tensor].name + missing.box.to_string());
  }
  summary.wanted_total = summary.wanted.size();
  summary.missing_total = summary.missing.size();
  for (auto& source : *sources_) {
    if (source.peer != nullptr) source.peer->close();
  }
  co_await finder_.close({});
  co_return summary;
}

}  // namespace rekindle::pull
