#include "transport/link_cuts.h"

#include <algorithm>
#include <string_view>
#include <utility>

namespace rekindle::transport {
namespace {

// Ended paths are kept for the report of a drill up to this number.
constexpr std::size_t kMostLinks = 1024;

std::int64_t to_ns(TimePoint when) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(when.time_since_epoch()).count();
}

}  // namespace

std::string peer_rail_of(const std::string& description) {
  constexpr std::string_view kArrow = " -> ";
  const auto arrow = description.find(kArrow);
  if (arrow == std::string::npos) return "";
  const auto begin = arrow + kArrow.size();
  return description.substr(begin, description.find(' ', begin) - begin);
}

// While it is silent, nobody looks at the real path, so that none of its news gets out. It has no
// descriptor then, because the real one may be readable all the time: the poller looks at it once a
// millisecond, and so sees the end of the silence.
class LinkCuts::SilentPath final : public Path {
 public:
  SilentPath(std::unique_ptr<Path> path, std::shared_ptr<Link> link)
      : path_(std::move(path)), link_(std::move(link)) {}
  ~SilentPath() override { link_->ended = true; }

  Result<std::size_t> post(std::span<const ReadOp> ops) override {
    if (silent()) return std::size_t{0};
    return path_->post(ops);
  }

  std::size_t poll(std::span<Completion> out) override {
    if (silent()) return 0;
    const std::size_t count = path_->poll(out);
    if (lost_in_silence_) {
      for (Completion& completion : out.first(count)) completion.status = OpStatus::kAborted;
      return count;
    }
    landed_ = path_->bytes_landed();
    link_->bytes.store(landed_, std::memory_order_relaxed);
    return count;
  }

  // The drain needs the real path, so the silence ends here.
  void abort() override {
    if (silent()) {
      lost_in_silence_ = true;
      link_->noticed_at = to_ns(steady_now());
    }
    path_->abort();
    aborted_ = true;
  }

  std::size_t in_flight() const override { return path_->in_flight(); }
  std::uint64_t bytes_landed() const override { return landed_; }
  int wait_fd() const override { return silent() ? -1 : path_->wait_fd(); }
  bool arm() override { return silent() || path_->arm(); }
  std::optional<TimePoint> wake_at() const override {
    return silent() ? std::nullopt : path_->wake_at();
  }
  bool wants_write() const override { return !silent() && path_->wants_write(); }
  std::string_view transport() const override { return path_->transport(); }
  std::string describe() const override { return path_->describe(); }
  std::string why_broken() const override {
    return lost_in_silence_ ? std::string() : path_->why_broken();
  }
  const PollerHome* home() const override { return path_->home(); }

 private:
  bool silent() const {
    const std::int64_t until = link_->silent_until.load(std::memory_order_relaxed);
    return until != 0 && !aborted_ && to_ns(steady_now()) < until;
  }

  const std::unique_ptr<Path> path_;
  const std::shared_ptr<Link> link_;
  std::uint64_t landed_ = 0;
  bool aborted_ = false;
  bool lost_in_silence_ = false;
};

std::unique_ptr<Path> LinkCuts::guard(std::unique_ptr<Path> path, std::string peer,
                                      std::string reader) {
  auto link = std::make_shared<Link>();
  link->reader = std::move(reader);
  link->peer = std::move(peer);
  link->description = path->describe();
  if (const PollerHome* home = path->home()) {
    link->rail = home->name;
    link->peer_rail = peer_rail_of(link->description);
  }
  {
    const std::lock_guard lock(mutex_);
    forget_ended();
    if (steady_now() < until_ && fits(*link)) silence(*link);
    links_.push_back(link);
  }
  return std::make_unique<SilentPath>(std::move(path), std::move(link));
}

void LinkCuts::cut(LinkFilter filter, TimePoint now, TimePoint until) {
  const std::lock_guard lock(mutex_);
  filter_ = std::move(filter);
  began_ = now;
  until_ = until;
  std::erase_if(links_, [](const auto& link) { return link->ended.load(); });
  for (const auto& link : links_) {
    link->silent_until = 0;
    link->noticed_at = 0;
    link->silenced = false;
    link->bytes_before = link->bytes.load(std::memory_order_relaxed);
    if (fits(*link)) silence(*link);
  }
}

void LinkCuts::heal() {
  const std::lock_guard lock(mutex_);
  until_ = TimePoint{};
  for (const auto& link : links_) link->silent_until = 0;
}

Duration LinkCuts::left(TimePoint now) const {
  const std::lock_guard lock(mutex_);
  return std::max(until_ - now, Duration{0});
}

std::vector<LinkCuts::Route> LinkCuts::routes() const {
  const std::lock_guard lock(mutex_);
  std::vector<Route> routes;
  for (const auto& link : links_) {
    Route route;
    route.reader = link->reader;
    route.peer = link->peer;
    route.description = link->description;
    route.silenced = link->silenced;
    route.ended = link->ended;
    route.bytes = link->bytes.load(std::memory_order_relaxed) - link->bytes_before;
    if (const std::int64_t noticed = link->noticed_at; noticed != 0) {
      route.noticed_after = std::chrono::nanoseconds(noticed - to_ns(began_));
    }
    routes.push_back(std::move(route));
  }
  return routes;
}

bool LinkCuts::fits(const Link& link) const {
  const auto fits_one = [](const std::string& wanted, const std::string& found) {
    return wanted.empty() || wanted == found;
  };
  return fits_one(filter_.peer, link.peer) && fits_one(filter_.rail, link.rail) &&
         fits_one(filter_.peer_rail, link.peer_rail);
}

void LinkCuts::silence(Link& link) const {
  link.silenced = true;
  link.silent_until = to_ns(until_);
}

void LinkCuts::forget_ended() {
  const bool reported = began_ != TimePoint{} && links_.size() < kMostLinks;
  if (!reported) std::erase_if(links_, [](const auto& link) { return link->ended.load(); });
}

}  // namespace rekindle::transport
