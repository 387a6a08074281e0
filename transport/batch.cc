#include "transport/batch.h"

#include <algorithm>
#include <utility>

#include "src/base/log.h"

namespace rekindle::transport {

namespace {

constexpr Duration kSnapshotInterval = std::chrono::milliseconds(50);

}  // namespace

Error SliceSource::local_fault(SliceIndex slice) {
  return {to_error_code(OpStatus::kLocalFault),
          fmt::format("slice {}: {}", slice, to_string(OpStatus::kLocalFault))};
}

BatchImpl::BatchImpl(std::uint64_t id, BatchHost& host, SliceSource& source,
                     BatchObserver& observer, const BatchOptions& options)
    : id_(id),
      host_(host),
      source_(source),
      observer_(observer),
      numa_node_(options.numa_node),
      scheduler_(
          source.slice_count(), [&source](SliceIndex slice) { return source.info(slice); }, options,
          std::chrono::steady_clock::now()) {}

void BatchImpl::add_paths(SourceIndex source, std::vector<std::unique_ptr<Path>> paths) {
  {
    const std::lock_guard lock(command_mutex_);
    new_paths_.push_back({source, std::move(paths)});
  }
  host_.wake();
}

void BatchImpl::remove_source(SourceIndex source, Error cause) {
  {
    const std::lock_guard lock(command_mutex_);
    removals_.emplace_back(source, std::move(cause));
  }
  host_.wake();
}

void BatchImpl::resolve(SliceIndex slice, Verdict verdict) {
  {
    const std::lock_guard lock(command_mutex_);
    verdicts_.emplace_back(slice, verdict);
  }
  host_.wake();
}

void BatchImpl::add_neighbour(SourceIndex source, std::uint64_t order_seed) {
  {
    const std::lock_guard lock(command_mutex_);
    neighbours_.emplace_back(source, order_seed);
  }
  host_.wake();
}

void BatchImpl::candidates_added(SourceIndex source, std::vector<SliceIndex> slices) {
  {
    const std::lock_guard lock(command_mutex_);
    gains_.emplace_back(source, std::move(slices));
  }
  host_.wake();
}

void BatchImpl::cancel() {
  {
    const std::lock_guard lock(command_mutex_);
    cancelled_ = true;
  }
  host_.wake();
}

BatchProgress BatchImpl::progress() const {
  const std::lock_guard lock(command_mutex_);
  return snapshot_;
}

bool BatchImpl::finished() const {
  const std::lock_guard lock(command_mutex_);
  return finished_;
}

bool BatchImpl::wait_finished(std::chrono::milliseconds deadline) {
  std::unique_lock lock(command_mutex_);
  return finished_changed_.wait_for(lock, deadline, [this] { return finished_; });
}

void BatchImpl::take_commands(TimePoint now) {
  std::vector<NewPaths> new_paths;
  std::vector<std::pair<SourceIndex, Error>> removals;
  std::vector<std::pair<SourceIndex, std::uint64_t>> neighbours;
  std::vector<std::pair<SourceIndex, std::vector<SliceIndex>>> gains;
  bool cancelled = false;
  {
    const std::lock_guard lock(command_mutex_);
    new_paths.swap(new_paths_);
    removals.swap(removals_);
    neighbours.swap(neighbours_);
    gains.swap(gains_);
    verdicts_taken_.clear();
    verdicts_taken_.swap(verdicts_);
    cancelled = cancelled_;
  }
  for (const auto& [source, order_seed] : neighbours) scheduler_.add_neighbour(source, order_seed);
  for (const auto& [source, slices] : gains) scheduler_.candidates_added(source, slices, now);
  additions_ += new_paths.size();
  for (auto& item : new_paths) {
    for (auto& path : item.paths) add_path(item.source, std::move(path), now);
  }
  for (const auto& [source, cause] : removals) scheduler_.remove_source(source, cause);
  for (const auto& [slice, verdict] : verdicts_taken_) {
    if (verdict == Verdict::kLocalFault) scheduler_.fail_batch(source_.local_fault(slice));
    scheduler_.resolve(slice, verdict, now);
  }
  if (cancelled) scheduler_.cancel();
}

// A path that comes after the end is destroyed at once: nothing would drain it.
void BatchImpl::add_path(SourceIndex source, std::unique_ptr<Path> path, TimePoint now) {
  if (reported_ || path == nullptr) return;
  if (source >= kMaxSources) {
    log::error("engine.bad_source", "source", source, "most", kMaxSources);
    return;
  }
  Route route;
  route.handle = std::make_shared<PathHandle>();
  route.handle->batch = id_;
  const PollerHome* home = path->home();
  route.handle->id = scheduler_.add_path(source, path->describe(), now, home ? home->name : "",
                                         std::string(path->transport()));
  route.poller = &host_.poller_for(home, numa_node_);
  route.poller->add_path(route.handle, std::move(path));
  open_.push_back(route.handle->id);
  routes_.push_back(std::move(route));
}

void BatchImpl::on_event(const PollerEvent& event, TimePoint now) {
  const PathId path = event.path->id;
  scheduler_.path_progress(path, event.path->bytes_landed.load(std::memory_order_relaxed), now);
  if (event.kind == PollerEvent::Kind::kPathClosed) {
    const std::string why = event.path->why();
    scheduler_.path_closed(path, why.empty() ? "the connection broke" : why);
    std::erase(open_, path);
    return;
  }
  finish_slice(event.work, event.work->worst, now);
}

void BatchImpl::finish_slice(SliceWork* work, OpStatus status, TimePoint now) {
  const PathId path = work->path->id;
  const SliceIndex slice = work->slice;
  const std::string why = status == OpStatus::kPeerLost ? work->path->why() : "";
  host_.release_work(work);
  const SourceIndex source = scheduler_.source_of(path);
  if (status != OpStatus::kOk) source_.dropped(slice, source);
  if (status == OpStatus::kLocalFault) scheduler_.fail_batch(source_.local_fault(slice));
  scheduler_.slice_done(path, slice, status, now, why);
  if (status == OpStatus::kOk) source_.landed(slice, source);
}

void BatchImpl::step(TimePoint now, bool tick) {
  take_commands(now);
  if (tick) {
    for (const PathId path : open_) {
      const auto landed = routes_[path].handle->bytes_landed.load(std::memory_order_relaxed);
      scheduler_.path_progress(path, landed, now);
    }
    scheduler_.tick(now);
  }
  send_aborts(now);
  post_slices(now);
  send_aborts(now);
  report(now);
}

void BatchImpl::send_aborts(TimePoint now) {
  for (const PathId path : scheduler_.take_aborts()) {
    // Work that the poller has not seen has no writer: it ends here.
    for (auto it = unsent_.begin(); it != unsent_.end();) {
      SliceWork* work = *it;
      if (work->path->id != path) {
        ++it;
        continue;
      }
      it = unsent_.erase(it);
      finish_slice(work, OpStatus::kAborted, now);
    }
    routes_[path].poller->abort_path(routes_[path].handle);
  }
}

void BatchImpl::post_slices(TimePoint now) {
  while (!unsent_.empty()) {
    SliceWork* work = unsent_.front();
    if (!routes_[work->path->id].poller->post(work)) return;
    unsent_.pop_front();
  }
  while (const auto post = scheduler_.next_post(now)) {
    if (!post_one(*post, now)) return;
  }
}

bool BatchImpl::post_one(const Scheduler::Post& post, TimePoint now) {
  SliceWork* work = host_.acquire_work();
  work->path = routes_[post.path].handle;
  work->slice = post.slice;
  auto expanded = source_.expand(post.slice, post.source, work->ops);
  if (!expanded) {
    host_.release_work(work);
    const bool exhausted = expanded.error().code() == ErrorCode::kExhausted;
    scheduler_.unpost(post.path, post.slice, now);
    if (!exhausted) scheduler_.fail_batch(std::move(expanded).error());
    return false;
  }
  if (!routes_[post.path].poller->post(work)) {
    unsent_.push_back(work);
    return false;
  }
  return true;
}

void BatchImpl::report(TimePoint now) {
  const auto outcome = scheduler_.outcome();
  const bool ends = outcome && !reported_;
  if (ends || now - last_snapshot_ >= kSnapshotInterval) {
    last_snapshot_ = now;
    auto progress = scheduler_.progress();
    const std::lock_guard lock(command_mutex_);
    snapshot_ = std::move(progress);
  }
  if (!reported_) {
    for (const auto& lost : scheduler_.take_lost()) {
      observer_.on_source_lost(lost.source, lost.cause);
    }
    if (const auto open_slices = scheduler_.take_starved()) {
      observer_.on_starved({*open_slices, additions_});
    }
  }
  if (ends) {
    reported_ = true;
    observer_.on_finished(*outcome);
  }
  if (!reported_ || !open_.empty()) return;
  const std::lock_guard lock(command_mutex_);
  finished_ = true;
  finished_changed_.notify_all();
}

}  // namespace rekindle::transport
