#include "recovery/worker/version_feed.h"

#include <algorithm>
#include <utility>

#include <fcntl.h>

#include <boost/asio/this_coro.hpp>

#include "src/async/offload.h"
#include "src/async/task.h"
#include "src/base/log.h"

namespace rekindle::worker {

namespace {

constexpr std::chrono::milliseconds kCheckWait{1000};
constexpr std::chrono::milliseconds kPlaceRetry{200};
constexpr std::chrono::seconds kViewWait{10};

// Opens the mapped file itself. Another file may have its name by now.
Result<UniqueFd> open_segment(const store::MappedSegment& segment) {
  UniqueFd fd(::open(fmt::format("/proc/self/fd/{}", segment.fd()).c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return fail_errno(errno, fmt::format("open {} for a worker", segment.path().string()));
  return fd;
}

// The phase of the session, from the name of the pull's phase.
std::optional<Phase> phase_of(const std::string& pull_phase) {
  if (pull_phase == "connect") return Phase::kRegister;
  if (pull_phase == "transfer" || pull_phase == "commit") return Phase::kWire;
  return std::nullopt;
}

}  // namespace

TileRuns KeptParts::add(const std::string& party, std::span<const bucket::KeptTiles> kept) {
  TileRuns whole;
  const auto add_whole = [&whole](TileIndex begin, TileIndex end) {
    if (!whole.empty() && whole.back().second == begin) {
      whole.back().second = end;
    } else {
      whole.emplace_back(begin, end);
    }
  };
  for (const bucket::KeptTiles& run : kept) {
    const TileIndex end = std::min(run.end, tile_count_);
    if (run.parts == 0 || run.begin >= end) continue;
    if (run.parts == run.of) {
      add_whole(run.begin, end);
      continue;
    }
    for (TileIndex tile = run.begin; tile < end; ++tile) {
      std::uint32_t& parts = parts_[{party, tile}];
      parts += run.parts;
      if (parts == run.of) add_whole(tile, tile + 1);
    }
  }
  return whole;
}

Result<void> VersionFeed::set_view(View view) {
  const std::size_t segments = view.portion->layout.segments().size();
  if (view.files.size() != segments) {
    return fail(ErrorCode::kInternal, "{} of {} segments of {} are here", view.files.size(),
                segments, wanted_.id.to_string());
  }
  for (const auto& segment : view.files) {
    TRY(auto fd, open_segment(*segment));
    view.segments.push_back(std::move(fd));
  }
  view_ = std::move(view);
  return {};
}

// A session that comes later does not wait until another one's GPU has all of its bytes.
void VersionFeed::read_by(std::string device) {
  devices_.insert(std::move(device));
  if (++readers_ > 1 && direct_ != nullptr) direct_->end("another worker waits for the same bytes");
}

bool VersionFeed::read_directly(std::shared_ptr<pull::DirectReads> reads) {
  if (started_ || view_ || complete_ || failed_ || readers_ > 1 || direct_ != nullptr) return false;
  direct_ = std::move(reads);
  return true;
}

bool VersionFeed::suspect() const {
  return view_ && view_->stored != nullptr &&
         view_->stored->verification->state() != store::CopyState::kVerified;
}

async::Task<void> VersionFeed::run() {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  auto local = co_await serve_local();
  Result<void> outcome;
  if (!local) {
    outcome = fail(std::move(local).error());
  } else if (!*local) {
    outcome = co_await serve_pull();
  }
  if (direct_ != nullptr) direct_->finish("this host's copy is at its end");
  if (outcome) {
    complete_ = true;
  } else if (!failed_) {
    failed_ = std::move(outcome).error();
  }
  changed.notify();
}

// Returns false if no copy here has everything that is wanted.
async::Task<Result<bool>> VersionFeed::serve_local() {
  Copies copies = host_.store().find(wanted_.id);
  std::erase_if(copies, [](const auto& copy) {
    return copy->verification->state() == store::CopyState::kQuarantined;
  });
  Found found = recent_.find(copies, wanted_);
  if (found.stored == nullptr) {
    auto find = [this, copies] { return find_portion(copies, wanted_); };
    CO_TRY(found, co_await async::offload(host_.blocking_pool(), std::move(find)));
    if (found.stored == nullptr) co_return false;
    recent_.add(copies, wanted_, found);
  }
  const auto stored = found.stored;
  const auto check = host_.verifier().check(stored);
  View view;
  view.checkpoint = stored->manifest.checkpoint;
  view.stored = stored;
  view.portion = std::move(found.portion);
  view.files.assign(stored->segments.begin(), stored->segments.end());
  view.rung = check != nullptr ? Rung::kAdopted : Rung::kLocal;
  if (check != nullptr) verified_ = check->verified;
  CO_TRY_VOID(set_view(std::move(view)));
  changed.notify();
  while (check != nullptr && !check->over()) {
    co_await check->changed.wait_until(steady_now() + kCheckWait);
    changed.notify();
    if (co_await async::is_cancelled()) co_return fail(ErrorCode::kUnavailable, "the agent stops");
  }
  if (check != nullptr && check->state == CopyCheck::State::kBad) {
    // The announced tiles did verify. The worker comes back for a copy that verifies as a whole.
    co_return fail(ErrorCode::kStale, "{}: {}; attach again, it is fetched anew",
                   wanted_.id.to_string(), check->why->message());
  }
  if (check != nullptr && check->state == CopyCheck::State::kUndecided) {
    // Announced tiles may have been changed after they had verified.
    co_return fail(ErrorCode::kStale, "{}: {}; attach again, it is verified again",
                   wanted_.id.to_string(), check->why->message());
  }
  co_return true;
}

pull::PullRequest VersionFeed::request() const {
  pull::PullRequest request;
  request.ref = {wanted_.id.model, wanted_.id.version};
  request.shard = wanted_.shard;
  request.spec_json = wanted_.spec_json;
  request.boxes = wanted_.boxes;
  request.fallback = wanted_.fallback_dir;
  request.transport = wanted_.transport;
  request.devices.assign(devices_.begin(), devices_.end());
  request.trace = trace_;
  return request;
}

void VersionFeed::on_begun(pull::Arriving arriving) {
  placing_ = arriving.placing;
  if (failed_) return;
  if (view_ || begun_) {
    // The pull begins again, because another pull had the place. The files are the same, unless
    // the other one left none.
    if (arriving.segments == (view_ ? view_->files : *begun_)) return;
    failed_ = Error(ErrorCode::kStale, fmt::format("the pull of {} was begun anew; attach again",
                                                   wanted_.id.to_string()));
    return changed.notify();
  }
  begun_ = arriving.segments;
  making_view_ = true;
  view_making_.spawn("worker.view", make_view(std::move(arriving)));
}

async::Task<void> VersionFeed::make_view(pull::Arriving arriving) {
  auto make = [checkpoint = arriving.checkpoint, layout = arriving.layout] {
    return Portion::make(*checkpoint, *layout, {});
  };
  auto portion = co_await async::offload(host_.blocking_pool(), std::move(make));
  making_view_ = false;
  view_made_.notify();
  if (failed_) co_return;
  View view;
  view.checkpoint = arriving.checkpoint;
  view.portion = std::move(portion);
  view.files = std::move(arriving.segments);
  view.rung = from_fallback_ ? Rung::kFallback : Rung::kPeers;
  verified_ = arriving.verified;
  auto set = set_view(std::move(view));
  // The pull goes on in any case: workers that attach later use its copy.
  if (!set) failed_ = std::move(set).error();
  changed.notify();
}

Lease VersionFeed::write() {
  const bool fetches = complete_ || failed_ || wanted_now_;
  return fetches || placing_ == nullptr ? Lease() : placing_->begin();
}

bool VersionFeed::can_fetch_now() const {
  return placing_ != nullptr && !placing_->closed() && view_ && !complete_ && !failed_;
}

void VersionFeed::fetch_now(std::vector<TileRuns> lists, pull::Placing::OnFailure on_failure) {
  if (placing_ != nullptr) placing_->fetch_now(std::move(lists), std::move(on_failure));
}

void VersionFeed::landed(const std::string& party, std::span<const bucket::KeptTiles> kept) {
  if (placing_ == nullptr || !view_) return;
  if (!kept_parts_) kept_parts_.emplace(view_->checkpoint->tiles.tile_count());
  placing_->landed(kept_parts_->add(party, kept));
}

async::Task<Result<void>> VersionFeed::serve_pull() {
  while (true) {
    place_taken_ = false;
    auto pulled = co_await pull_once();
    const bool busy = !pulled && place_taken_;
    const bool stop = co_await async::is_cancelled();
    if (!busy || view_ || failed_ || stop || !interests_.held()) co_return pulled;
    obstacle_ = std::move(pulled).error();
    changed.notify();
    co_await async::sleep_for(kPlaceRetry);
  }
}

async::Task<Result<void>> VersionFeed::pull_once() {
  started_ = true;
  pull::PullWatch watch;
  watch.direct = direct_;
  watch.on_begun = [this](pull::Arriving arriving) { on_begun(std::move(arriving)); };
  watch.on_place_taken = [this] { place_taken_ = true; };
  watch.held = [this] { return !wanted_now_ && pauses_.held(); };
  watch.held_changed = pause_changed_;
  const auto progress = [this](const pull::Progress& update) {
    if (const auto phase = phase_of(update.phase)) phase_ = *phase;
    if (update.note.find("reading ") != std::string::npos && !wanted_.fallback_dir.empty()) {
      from_fallback_ = true;
      if (view_) view_->rung = Rung::kFallback;
    }
    changed.notify();
  };
  auto stored = co_await host_.pull(request(), progress, std::move(watch));
  // Bounded: it is computed, and waits for nobody.
  while (making_view_) co_await view_made_.wait_until(steady_now() + kViewWait);
  if (!stored) co_return fail(std::move(stored).error());
  if (view_) {
    view_->stored = std::move(*stored);
    co_return Result<void>();
  }
  if (failed_) co_return fail(*failed_);
  // The copy was here before, or another pull has brought it.
  auto local = co_await serve_local();
  if (!local) co_return fail(std::move(local).error());
  if (!*local) {
    co_return fail(ErrorCode::kStale, "{} was retired while a worker attached; attach again",
                   wanted_.id.to_string());
  }
  co_return Result<void>();
}

VersionFeeds::VersionFeeds(CopyHost& host, boost::asio::any_io_executor executor)
    : host_(host), executor_(std::move(executor)), tasks_(executor_) {}

async::Task<void> VersionFeeds::close(std::chrono::milliseconds deadline) {
  (void)co_await tasks_.close(deadline);
}

std::shared_ptr<VersionFeed> VersionFeeds::get(const Wanted& wanted, const std::string& device,
                                               const trace::Context& attach) {
  const auto found = running_.find(wanted);
  if (found != running_.end() && !found->second->failed()) {
    found->second->read_by(device);
    return found->second;
  }
  auto feed = std::make_shared<VersionFeed>(host_, recent_, wanted, executor_);
  feed->read_by(device);
  feed->belongs_to(attach);
  running_[wanted] = feed;
  tasks_.spawn("worker.feed", run(feed));
  return feed;
}

async::Task<void> VersionFeeds::run(std::shared_ptr<VersionFeed> feed) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  co_await feed->run();
  const auto found = running_.find(feed->wanted());
  if (found != running_.end() && found->second == feed) running_.erase(found);
}

}  // namespace rekindle::worker
