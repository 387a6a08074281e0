#include "recovery/pull/transfer.h"

#include <algorithm>
#include <utility>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "recovery/pull/concurrently.h"
#include "recovery/pull/memory_path.h"
#include "recovery/pull/offload.h"
#include "recovery/rpc/convert.h"
#include "src/base/log.h"

namespace rekindle::pull {

using transport::SourceIndex;

namespace {

constexpr std::chrono::milliseconds kTick{200};
constexpr std::chrono::milliseconds kConnectDeadline{2000};
constexpr std::chrono::milliseconds kKeepAliveInterval{10000};
constexpr std::uint32_t kPathsPerSource = 4;
constexpr int kReconnectsPerSource = 1;

}  // namespace

Transfer::Transfer(const PullEnvironment& environment, const ModelVersion& id,
                   const Digest128& root, std::shared_ptr<const planner::Plan> plan,
                   std::shared_ptr<store::PendingVersion> destination,
                   std::shared_ptr<VerifiedTiles> verified,
                   std::shared_ptr<std::vector<ActiveSource>> sources, std::string forced_transport,
                   std::shared_ptr<PullCounters> counters, std::uint32_t suspicion, Hooks hooks)
    : environment_(environment),
      id_(id),
      root_(root),
      source_table_(std::move(sources)),
      sources_(*source_table_),
      forced_transport_(std::move(forced_transport)),
      hooks_(std::move(hooks)),
      slices_(std::make_shared<PlanSliceSource>(
          std::move(plan), std::move(destination), std::move(verified), *environment.digest_pool,
          make_range_digester(), std::move(counters), suspicion)),
      timer_(std::make_shared<boost::asio::steady_timer>(environment.executor)) {}

Transfer::~Transfer() {
  slices_->bind(nullptr);
  batch_.reset();  // cancels what still runs and waits for the drain
}

rpc::Task<Result<void>> Transfer::run() {
  batch_ = environment_.engine->start(*slices_, *this, {});
  slices_->bind(batch_.get());
  connecting_ = static_cast<int>(sources_.size());
  for (SourceIndex i = 0; i < sources_.size(); ++i) {
    boost::asio::co_spawn(environment_.executor, connect_source(i), boost::asio::detached);
  }
  std::optional<Result<void>> outcome;
  while (true) {
    handle_events();
    {
      const std::lock_guard lock(mutex_);
      outcome = finished_;
    }
    // Connects under way refer to this object: they are cut short, then waited for.
    if (outcome && connecting_ == 0) break;
    if (outcome) stop_connecting();
    const auto cancellation = co_await boost::asio::this_coro::cancellation_state;
    const bool cancelled = cancellation.cancelled() != boost::asio::cancellation_type::none;
    if (cancelled || (starved_ && connecting_ == 0)) batch_->cancel();
    keep_peers_alive();
    if (hooks_.tick) hooks_.tick(batch_->progress());
    timer_->expires_after(kTick);
    boost::system::error_code woken;
    co_await timer_->async_wait(boost::asio::redirect_error(boost::asio::use_awaitable, woken));
  }
  if (hooks_.tick) hooks_.tick(batch_->progress());
  slices_->bind(nullptr);
  batch_.reset();
  co_await close_sessions();
  if (*outcome || !starved_) co_return std::move(*outcome);
  co_return fail(ErrorCode::kUnavailable, "no source is left for a part of {}", id_.to_string());
}

void Transfer::on_source_lost(SourceIndex source, const Error& cause) {
  {
    const std::lock_guard lock(mutex_);
    events_.push_back({Event::Kind::kLost, source, cause});
  }
  wake();
}

void Transfer::on_starved(std::uint64_t) {
  {
    const std::lock_guard lock(mutex_);
    events_.push_back({Event::Kind::kStarved, 0, std::nullopt});
  }
  wake();
}

void Transfer::on_finished(const Result<void>& outcome) {
  {
    const std::lock_guard lock(mutex_);
    finished_ = outcome;
  }
  wake();
}

void Transfer::wake() {
  boost::asio::post(environment_.executor, [timer = timer_] { timer->cancel(); });
}

void Transfer::handle_events() {
  std::deque<Event> events;
  {
    const std::lock_guard lock(mutex_);
    events.swap(events_);
  }
  for (const auto& event : events) {
    if (event.kind == Event::Kind::kStarved) {
      starved_ = true;
      continue;
    }
    ActiveSource& source = sources_[event.source];
    const Error& cause = *event.cause;
    source.quarantined = cause.code() == ErrorCode::kCorrupt;
    const bool again =
        !source.quarantined && source.peer != nullptr && source.reconnects < kReconnectsPerSource;
    if (again) {
      ++source.reconnects;
      ++connecting_;
      log::info("pull.reconnect", "source", source.name, "cause", cause);
      boost::asio::co_spawn(environment_.executor, reconnect(event.source), boost::asio::detached);
    } else {
      lose(event.source, cause.message());
    }
  }
}

void Transfer::keep_peers_alive() {
  const auto now = std::chrono::steady_clock::now();
  if (now - last_keep_alive_ < kKeepAliveInterval) return;
  last_keep_alive_ = now;
  for (const auto& source : sources_) {
    if (source.peer == nullptr || source.lost || !source.peer->connected()) continue;
    boost::asio::co_spawn(environment_.executor, SourcePeer::keep_alive(source.peer),
                          boost::asio::detached);
  }
}

void Transfer::lose(SourceIndex index, const std::string& cause) {
  ActiveSource& source = sources_[index];
  source.lost = true;
  source.cause = cause;
  const bool others = std::any_of(sources_.begin(), sources_.end(),
                                  [](const ActiveSource& other) { return !other.lost; });
  log::warn("pull.source_lost", "source", source.name, "cause", cause);
  if (hooks_.note) {
    hooks_.note(fmt::format("source {} lost: {}{}", source.name, cause,
                            others ? "; continuing from the others" : ""));
  }
}

void Transfer::stop_connecting() {
  for (const auto& source : sources_) {
    if (source.connecting && source.peer != nullptr) source.peer->close();
  }
}

rpc::Task<void> Transfer::connect_source(SourceIndex index) {
  ActiveSource& source = sources_[index];
  source.connecting = true;
  auto opened = co_await open_paths(source, index);
  source.connecting = false;
  --connecting_;
  starved_ = starved_ && !opened;
  if (!opened) lose(index, opened.error().message());
  timer_->cancel();
}

rpc::Task<void> Transfer::reconnect(SourceIndex index) {
  ActiveSource& source = sources_[index];
  source.connecting = true;
  Result<void> opened;
  if (!source.peer->connected()) {
    auto peer =
        co_await SourcePeer::connect(source.record, environment_.identity, kConnectDeadline);
    if (peer) {
      source.peer = std::move(*peer);
    } else {
      opened = fail(std::move(peer).error());
    }
  }
  if (opened) opened = co_await open_paths(source, index);
  source.connecting = false;
  --connecting_;
  starved_ = starved_ && !opened;
  if (!opened) lose(index, opened.error().message());
  timer_->cancel();
}

std::vector<std::string> Transfer::transports_for(const ActiveSource& source) const {
  if (!forced_transport_.empty()) return {forced_transport_};
  const bool same_host = !environment_.self.host_id().empty() &&
                         environment_.self.host_id() == source.record.node().host_id();
  std::vector<std::string> names;
  for (const auto* connector : environment_.connectors) {
    if (connector->transport() == "shm" && !same_host) continue;
    names.emplace_back(connector->transport());
  }
  return names;
}

rpc::Task<Result<void>> Transfer::open_paths(ActiveSource& source, SourceIndex index) {
  std::vector<std::unique_ptr<transport::Path>> paths;
  if (source.peer == nullptr) {
    source.transport = "local";
    std::vector<transport::RegionKey> keys;
    for (std::uint32_t i = 0; i < source.local_segments.size(); ++i) keys.push_back({i, 0});
    slices_->set_regions(index, std::move(keys));
    paths.push_back(
        std::make_unique<MemoryPath>(source.name, source.local_segments, source.keep_alive));
    batch_->add_paths(index, std::move(paths));
    co_return Result<void>();
  }
  CO_TRY(auto session,
         co_await source.peer->open_session(environment_.self, id_, root_, transports_for(source)));
  slices_->set_regions(index, session.regions);
  std::optional<Error> last_error;
  for (const auto& offer : session.offers) {
    const auto found = std::find_if(
        environment_.connectors.begin(), environment_.connectors.end(),
        [&](const transport::Connector* c) { return c->transport() == offer.transport; });
    if (found == environment_.connectors.end()) continue;
    transport::PathTarget target{offer.transport, offer.endpoint, session.token,
                                 source.peer->incarnation()};
    const std::uint32_t wanted = std::clamp(offer.max_paths, 1u, kPathsPerSource);
    // The first path decides; more are worth having, not worth failing for.
    const auto deadline = std::chrono::steady_clock::now() + kConnectDeadline;
    auto connected = co_await offload(*environment_.blocking_pool, [&, connector = *found] {
      std::vector<std::unique_ptr<transport::Path>> made;
      std::optional<Error> error;
      while (made.size() < wanted && !error) {
        auto path = connector->connect(target, deadline);
        if (path) {
          made.push_back(std::move(*path));
        } else {
          error = std::move(path).error();
        }
      }
      return std::make_shared<
          std::pair<std::vector<std::unique_ptr<transport::Path>>, std::optional<Error>>>(
          std::move(made), std::move(error));
    });
    if (!connected->first.empty()) {
      source.transport = offer.transport;
      source.session = std::move(session);
      batch_->add_paths(index, std::move(connected->first));
      co_return Result<void>();
    }
    last_error = std::move(connected->second);
    log::warn("pull.transport_failed", "source", source.name, "transport", offer.transport, "error",
              last_error->message());
  }
  if (last_error) co_return fail(std::move(*last_error));
  co_return fail(ErrorCode::kUnavailable, "source {} offers no transport that this side can use{}",
                 source.name,
                 forced_transport_.empty() ? "" : " (--transport " + forced_transport_ + ")");
}

rpc::Task<void> Transfer::close_sessions() {
  std::vector<rpc::Task<void>> closes;
  for (auto& source : sources_) {
    if (source.peer == nullptr || !source.session || source.lost) continue;
    closes.push_back(source.peer->close_session(source.session->token));
    source.session.reset();
  }
  co_await run_all(std::move(closes));
}

namespace {

rpc::Task<void> digest_ranges(std::shared_ptr<std::vector<ActiveSource>> sources, Digest128 root,
                              SourceIndex index, std::vector<RangeDigestItem> items,
                              std::function<void(Result<std::vector<std::uint64_t>>)> done) {
  const ActiveSource& source = (*sources)[index];
  if (source.peer == nullptr || !source.session) {
    done(fail(ErrorCode::kUnavailable, "source {} has no session", source.name));
    co_return;
  }
  proto::DigestBoxesRequest request;
  *request.mutable_root() = rpc::to_proto(root);
  *request.mutable_layout() = source.record.layout();
  request.set_token(source.session->token.to_bytes());
  for (const auto& item : items) {
    auto* box = request.add_items();
    box->set_tile(item.tile);
    for (const auto value : item.box.offset.span()) box->add_offset(value);
    for (const auto value : item.box.extent.span()) box->add_extent(value);
  }
  done(co_await source.peer->digest_boxes(std::move(request)));
}

}  // namespace

// Captures no `this`: a verification may outlive a cancelled transfer.
RangeDigester Transfer::make_range_digester() const {
  return [executor = environment_.executor, sources = source_table_, root = root_](
             SourceIndex source, std::vector<RangeDigestItem> items,
             std::function<void(Result<std::vector<std::uint64_t>>)> done) {
    boost::asio::co_spawn(executor,
                          digest_ranges(sources, root, source, std::move(items), std::move(done)),
                          boost::asio::detached);
  };
}

}  // namespace rekindle::pull
