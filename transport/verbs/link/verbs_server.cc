// The source's side: it registers regions, answers handshakes and takes rights away.
#include <algorithm>
#include <condition_variable>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "src/base/log.h"
#include "src/base/units.h"
#include "src/base/worker_pool.h"
#include "transport/verbs/direct/served_link.h"
#include "transport/verbs/link/verbs_connection.h"
#include "transport/verbs/link/verbs_wire.h"
#include "transport/verbs/staged/stage_service.h"
#include "transport/verbs/verbs_transport.h"

namespace rekindle::transport::verbs {
namespace {

constexpr std::chrono::seconds kSweepInterval{1};

class VerbsServerImpl final : public VerbsServer, private RegionObserver {
 public:
  VerbsServerImpl(Fabric& fabric, MemoryRegistrar& registrar, SegmentRegistry& registry,
                  const Incarnation& incarnation, const VerbsServerOptions& options)
      : fabric_(fabric),
        registrar_(registrar),
        registry_(registry),
        incarnation_(incarnation),
        options_(options),
        stage_(fabric, registry,
               {options.staging_bytes, options.staging_idle_limit, [this] { sweep_soon(); }}) {
    registry_.observe(this);
    sweeper_ = std::thread([this] {
      set_thread_name("rk-verbs-srv");
      sweep();
    });
  }
  ~VerbsServerImpl() override;

  std::string endpoint(std::string_view) const override;
  Result<std::string> accept(const SessionToken& token, std::string_view request) override;
  void drop_session(const SessionToken& token) override;
  std::vector<Error> registration_problems() const override;
  std::size_t link_count() const override;

 private:
  using Links = std::vector<std::unique_ptr<SourceLink>>;
  using Ending = std::vector<std::pair<SessionToken, std::unique_ptr<SourceLink>>>;
  using Lock = std::unique_lock<std::mutex>;

  void region_added(const std::shared_ptr<const Region>& region) override;
  void region_removed(RegionKey key) override;
  Result<ServedRegions> regions_of(const Session& session, std::vector<RegionKey>& stale) const;
  Result<std::unique_ptr<SourceLink>> make_link(const LinkRequest& request, const Session& session,
                                                const ServedRegions& regions);
  Result<std::unique_ptr<SourceLink>> make_staged_link(Rail& rail, const LinkRequest& request,
                                                       const Session& session,
                                                       const ServedRegions& regions, Error why);
  Result<void> check_complete(const ServedRegions& regions, const Device& device) const;
  Result<void> keep(const SessionToken& token, Links& links);
  void sweep_soon();
  void sweep();
  // Called with the lock held. end_links() releases it meanwhile.
  void make_room(const SessionToken& token, const SourceLink& link, Ending& ending);
  void take_session(const SessionToken& token, Ending& ending);
  void take_useless(Ending& ending);
  void end_links(Lock& lock, Ending ending);
  void say_what_is_missing();

  Fabric& fabric_;
  MemoryRegistrar& registrar_;
  SegmentRegistry& registry_;
  const Incarnation incarnation_;
  const VerbsServerOptions options_;

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  bool sweep_soon_ = false;  // guarded by mutex_
  StageService stage_;       // calls sweep_soon(); its links are in sessions_
  ServedRegions regions_;    // guarded by mutex_, as are the rest
  std::vector<std::shared_ptr<RegisteredMemory>> removed_;  // deregistered by the sweeper
  std::unordered_map<SessionToken, Links> sessions_;        // links in the order they were made
  std::unordered_multiset<SessionToken> ending_;            // whose links are being revoked
  std::condition_variable ended_;
  // Settled regions whose missing parts were logged.
  std::set<RegionKey> told_;
  bool stop_ = false;
  std::thread sweeper_;
};

VerbsServerImpl::~VerbsServerImpl() {
  registry_.observe(nullptr);
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  sweeper_.join();
  Lock lock(mutex_);
  Ending all;
  while (!sessions_.empty()) take_session(sessions_.begin()->first, all);
  end_links(lock, std::move(all));  // before the regions that they read
}

void VerbsServerImpl::region_added(const std::shared_ptr<const Region>& region) {
  auto memory = registrar_.add(region->bytes, MemoryUse::kServe, region->fd, region->fd_offset,
                               region->keep_alive);
  const std::lock_guard lock(mutex_);
  regions_.emplace(region->key, std::move(memory));
}

void VerbsServerImpl::region_removed(RegionKey key) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = regions_.find(key);
    if (found == regions_.end()) return;
    removed_.push_back(std::move(found->second));
    regions_.erase(found);
    told_.erase(key);
  }
  wake_.notify_all();
}

std::string VerbsServerImpl::endpoint(std::string_view) const {
  return Endpoint{rails_up(fabric_)}.to_bytes();
}

Result<ServedRegions> VerbsServerImpl::regions_of(const Session& session,
                                                  std::vector<RegionKey>& stale) const {
  ServedRegions regions;
  {
    const std::lock_guard lock(mutex_);
    for (const RegionKey key : session.regions) {
      const auto found = regions_.find(key);
      if (found == regions_.end()) {
        stale.push_back(key);
      } else {
        regions.insert(*found);
      }
    }
  }
  const TimePoint deadline = std::chrono::steady_clock::now() + options_.registration_patience;
  for (const auto& [key, memory] : regions) {
    if (memory->wait_settled(deadline)) continue;
    return fail(ErrorCode::kUnavailable, "the source is still registering {} with its NICs",
                format_bytes(memory->bytes().size()));
  }
  return regions;
}

// One-sided reads cannot be served in part: a device has a region registered whole, or the region
// is staged.
Result<void> VerbsServerImpl::check_complete(const ServedRegions& regions,
                                             const Device& device) const {
  for (const auto& [key, memory] : regions) {
    std::uint64_t bytes = 0;
    for (const Piece& piece : memory->pieces(device)) bytes += piece.bytes;
    if (bytes == memory->bytes().size()) continue;
    auto problems = memory->problems();
    if (!problems.empty()) return fail(std::move(problems.front()));
    return fail(ErrorCode::kExhausted, "{}: {} of {} are registered", device.name(),
                format_bytes(bytes), format_bytes(memory->bytes().size()));
  }
  return {};
}

Result<std::unique_ptr<SourceLink>> VerbsServerImpl::make_link(const LinkRequest& request,
                                                               const Session& session,
                                                               const ServedRegions& regions) {
  const auto& rails = fabric_.rails();
  if (request.source_rail >= rails.size()) {
    return fail(ErrorCode::kInvalid, "no rail {} here", request.source_rail);
  }
  Rail& rail = *rails[request.source_rail];
  if (auto complete = check_complete(regions, rail.device()); !complete) {
    return make_staged_link(rail, request, session, regions, std::move(complete).error());
  }
  return ServedLink::create(rail, request, options_.max_queue_pairs, regions);
}

// `why` names the bytes needed and the remedy. The puller gets it if nothing can be staged either.
Result<std::unique_ptr<SourceLink>> VerbsServerImpl::make_staged_link(Rail& rail,
                                                                      const LinkRequest& request,
                                                                      const Session& session,
                                                                      const ServedRegions& regions,
                                                                      Error why) {
  auto link = stage_.open(rail, request, session, regions);
  if (link) return link;
  return fail(why.code(), "{} (staged: {})", why.message(), link.error().message());
}

Result<std::string> VerbsServerImpl::accept(const SessionToken& token, std::string_view bytes) {
  TRY(const auto request, ConnectRequest::parse(bytes));
  if (request.source != incarnation_) {
    return fail(ErrorCode::kStale, "another incarnation serves here: look the source up again");
  }
  const auto session = registry_.find_session(token);
  if (!session) {
    return fail(ErrorCode::kDenied, "the session is not known here: ask for a new grant");
  }
  ConnectResponse response;
  response.source = incarnation_;
  response.max_bytes_per_second = session->max_bytes_per_second;
  response.rails = rails_up(fabric_);
  if (request.links.empty()) return response.to_bytes();
  TRY(const ServedRegions regions, regions_of(*session, response.stale));

  // All at once, as resolving the address of a missing peer takes time.
  std::vector<Result<std::unique_ptr<SourceLink>>> made(request.links.size());
  run_together(made.size(),
               [&](std::size_t i) { made[i] = make_link(request.links[i], *session, regions); });
  Links links;
  for (auto& link : made) {
    if (link) {
      response.links.push_back((*link)->response());
      links.push_back(std::move(*link));
    } else {
      response.links.emplace_back().error = link.error().message();
    }
  }
  TRY_VOID(keep(token, links));
  return response.to_bytes();
}

// On an error the caller keeps `links`. No puller knows their keys.
Result<void> VerbsServerImpl::keep(const SessionToken& token, Links& links) {
  Lock lock(mutex_);
  // drop_session() runs after the registry has forgotten the session. So either this call sees
  // that, or drop_session() sees the links that are kept here.
  if (!registry_.find_session(token)) {
    return fail(ErrorCode::kDenied, "the session was revoked meanwhile: ask for a new grant");
  }
  Ending ending;
  for (const auto& link : links) make_room(token, *link, ending);
  const auto found = sessions_.find(token);
  const std::size_t kept = found == sessions_.end() ? 0 : found->second.size();
  if (kept + links.size() > options_.max_links_per_session) {
    end_links(lock, std::move(ending));
    return fail(ErrorCode::kUnavailable, "the session has {} links already, at most {}", kept,
                options_.max_links_per_session);
  }
  if (!links.empty()) {
    auto& all = sessions_[token];
    std::move(links.begin(), links.end(), std::back_inserter(all));
  }
  end_links(lock, std::move(ending));
  return {};
}

// A puller whose path has broken connects again. Nothing tells this side that the old link is of no
// use any more.
void VerbsServerImpl::make_room(const SessionToken& token, const SourceLink& link, Ending& ending) {
  const auto found = sessions_.find(token);
  if (found == sessions_.end()) return;
  auto& links = found->second;
  const auto same = [&](const std::unique_ptr<SourceLink>& other) {
    return other->source_rail() == link.source_rail() && other->puller_rail() == link.puller_rail();
  };
  const auto alive = static_cast<std::size_t>(std::count_if(links.begin(), links.end(), same));
  if (alive < options_.max_links_per_rail_pair) return;
  const auto oldest = std::find_if(links.begin(), links.end(), same);
  ending.emplace_back(token, std::move(*oldest));
  links.erase(oldest);
}

void VerbsServerImpl::take_session(const SessionToken& token, Ending& ending) {
  const auto found = sessions_.find(token);
  if (found == sessions_.end()) return;
  for (auto& link : found->second) ending.emplace_back(found->first, std::move(link));
  sessions_.erase(found);
}

// A link whose rail went down is of no use. A link to a removed region must end before the region
// is deregistered.
void VerbsServerImpl::take_useless(Ending& ending) {
  for (auto& [token, links] : sessions_) {
    for (auto& link : links) {
      if (!link->over(regions_)) continue;
      ending.emplace_back(token, std::move(link));
    }
    std::erase(links, nullptr);
  }
  std::erase_if(sessions_, [](const auto& session) { return session.second.empty(); });
}

void VerbsServerImpl::end_links(Lock& lock, Ending ending) {
  if (ending.empty()) return;
  std::vector<SourceLink*> links;
  for (const auto& [token, link] : ending) {
    ending_.insert(token);
    links.push_back(link.get());
  }
  lock.unlock();
  SourceLink::revoke_all(links);
  for (auto& [token, link] : ending) link.reset();
  lock.lock();
  for (const auto& [token, link] : ending) ending_.erase(ending_.find(token));
  ended_.notify_all();
}

void VerbsServerImpl::drop_session(const SessionToken& token) {
  Lock lock(mutex_);
  Ending ending;
  take_session(token, ending);
  end_links(lock, std::move(ending));
  // Another thread may be ending some of its links already.
  ended_.wait(lock, [&] { return !ending_.contains(token); });
}

void VerbsServerImpl::sweep_soon() {
  {
    const std::lock_guard lock(mutex_);
    sweep_soon_ = true;
  }
  wake_.notify_all();
}

void VerbsServerImpl::sweep() {
  Lock lock(mutex_);
  while (!stop_) {
    wake_.wait_for(lock, kSweepInterval,
                   [this] { return stop_ || sweep_soon_ || !removed_.empty(); });
    sweep_soon_ = false;
    say_what_is_missing();
    Ending ending;
    take_useless(ending);
    auto removed = std::exchange(removed_, {});
    end_links(lock, std::move(ending));
    lock.unlock();
    removed.clear();
    lock.lock();
  }
}

// Warns the operator of this host, whether somebody pulls or not. One line says it once all added
// regions are settled, so usually once, at start. Called with the lock held.
void VerbsServerImpl::say_what_is_missing() {
  const auto is_open = [](const auto& region) { return !region.second->settled(); };
  if (told_.size() == regions_.size() || std::any_of(regions_.begin(), regions_.end(), is_open)) {
    return;
  }
  std::size_t lacking = 0;
  std::uint64_t missing_bytes = 0;  // summed over devices, as memory is pinned
  std::optional<Error> why;
  for (const auto& [key, memory] : regions_) {
    if (!told_.insert(key).second) continue;
    auto problems = memory->problems();
    if (problems.empty()) continue;
    ++lacking;
    if (!why) why = std::move(problems.front());
    for (const auto& device : fabric_.devices()) {
      missing_bytes += memory->bytes().size();
      for (const Piece& piece : memory->pieces(*device)) missing_bytes -= piece.bytes;
    }
  }
  if (!why) return;
  log::warn("verbs.not_registered", "segments", fmt::format("{} of {}", lacking, regions_.size()),
            "missing", format_bytes(missing_bytes), "why", *why, "served",
            stage_.has_window() ? "through a staging window, slower" : "not over RDMA");
}

std::vector<Error> VerbsServerImpl::registration_problems() const {
  std::vector<Error> problems;
  const std::lock_guard lock(mutex_);
  for (const auto& [key, memory] : regions_) {
    for (auto& problem : memory->problems()) problems.push_back(std::move(problem));
  }
  return problems;
}

std::size_t VerbsServerImpl::link_count() const {
  const std::lock_guard lock(mutex_);
  // Links under revocation may still read.
  std::size_t count = ending_.size();
  for (const auto& [token, links] : sessions_) count += links.size();
  return count;
}

}  // namespace

std::unique_ptr<VerbsServer> VerbsServer::create(Fabric& fabric, MemoryRegistrar& registrar,
                                                 SegmentRegistry& registry,
                                                 const Incarnation& incarnation,
                                                 const VerbsServerOptions& options) {
  return std::make_unique<VerbsServerImpl>(fabric, registrar, registry, incarnation, options);
}

}  // namespace rekindle::transport::verbs
