#include "recovery/coordinator/status_page.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

#include <unistd.h>

#include <fmt/format.h>

#include "recovery/coordinator/page_files.h"
#include "recovery/rpc/address.h"
#include "src/base/log.h"

namespace rekindle::coordinator {

namespace {

constexpr Duration kFleetKept = std::chrono::milliseconds(500);
constexpr Duration kClockSlack = std::chrono::milliseconds(100);
constexpr std::string_view kPolicy =
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'";

rpc::HttpAnswer error_answer(int status, const std::string& error) {
  return {status, error_json(error)};
}

std::string_view type_of(std::string_view name) {
  if (name.ends_with(".html")) return "text/html; charset=utf-8";
  if (name.ends_with(".css")) return "text/css; charset=utf-8";
  return "text/javascript; charset=utf-8";
}

rpc::HttpAnswer answer_file(std::string_view path) {
  const std::string_view name = path == "/" ? "index.html" : path.substr(1);
  for (const PageFile& file : page_files()) {
    if (file.name != name) continue;
    rpc::HttpAnswer answer{200, std::string(file.content), std::string(type_of(name))};
    answer.etag = file.digest;
    return answer;
  }
  return error_answer(404, "no such page; the page is /, its API is below /api/v1/");
}

// The value of a number in "after=12&x=3". 0: it is not there.
std::uint64_t number_in(std::string_view query, std::string_view key) {
  std::uint64_t value = 0;
  while (!query.empty()) {
    const auto end = std::min(query.find('&'), query.size());
    const std::string_view pair = query.substr(0, end);
    query.remove_prefix(std::min(end + 1, query.size()));
    if (!pair.starts_with(key) || pair.substr(key.size(), 1) != "=") continue;
    const std::string_view text = pair.substr(key.size() + 1);
    (void)std::from_chars(text.data(), text.data() + text.size(), value);
  }
  return value;
}

bool is_number(const std::string& host) { return !rpc::numeric_endpoints({host, 1}).empty(); }

bool is_loopback(const std::string& host) {
  return host == "localhost" || host == "::1" || (is_number(host) && host.starts_with("127."));
}

std::string host_name() {
  std::array<char, 256> name{};
  (void)::gethostname(name.data(), name.size() - 1);
  return name.data();
}

}  // namespace

Result<void> StatusPage::listen(const boost::asio::any_io_executor& executor,
                                const std::string& address, rpc::HttpAccess access) {
  TRY(const rpc::HostPort wanted, rpc::HostPort::parse(address));
  host_ = wanted.host;
  const bool is_open = access.is_open;
  rpc::HttpOptions options;
  options.access = std::move(access);
  TRY(server_,
      rpc::HttpServer::listen(
          executor, "--http", address,
          [this](const rpc::HttpRequest& request) { return answer(request); }, std::move(options)));
  address_ = server_->address();
  log::info("http.ready", "address", address_);
  if (is_open && !is_loopback(host_)) {
    log::warn(
        "http.no_rights", "address", address_, "why",
        "everybody who reaches it may read the state of the fleet; give a loopback address, or "
        "certificates without --http-open");
  }
  return {};
}

async::Task<void> StatusPage::close(std::chrono::milliseconds deadline) {
  if (server_ != nullptr) co_await server_->close(deadline);
}

// A page of another site whose name was made to resolve to this address would otherwise read the
// fleet through the browser of somebody who may. Such a site cannot use a number or our own name.
// By https, the browser finds that our certificate is not that site's.
bool StatusPage::is_own_name(std::string_view host) const {
  std::string name(host);
  if (const auto parsed = rpc::HostPort::parse(name)) {
    name = parsed->host;
  } else if (name.size() > 2 && name.front() == '[' && name.back() == ']') {
    name = name.substr(1, name.size() - 2);
  }
  return name == "localhost" || name == host_ || is_number(name) || name == host_name();
}

rpc::HttpAnswer StatusPage::answer(const rpc::HttpRequest& request) {
  rpc::HttpAnswer answer;
  if (request.is_encrypted || is_own_name(request.host)) {
    const std::string_view target = request.target;
    const auto mark = std::min(target.find('?'), target.size());
    const std::string_view path = target.substr(0, mark);
    const std::string_view query = target.substr(std::min(mark + 1, target.size()));
    constexpr std::string_view kApi = "/api/v1/";
    answer = path.starts_with(kApi) ? answer_api(path.substr(kApi.size()), query)
                                    : answer_file(path.empty() ? "/" : path);
  } else {
    answer = error_answer(421, fmt::format("host '{}' is not this coordinator: use its address, "
                                           "localhost, or the name given with --http",
                                           request.host.substr(0, 255)));
  }
  answer.headers = {{"Content-Security-Policy", std::string(kPolicy)},
                    {"X-Content-Type-Options", "nosniff"},
                    {"Referrer-Policy", "no-referrer"},
                    {"Cross-Origin-Resource-Policy", "same-origin"}};
  return answer;
}

rpc::HttpAnswer StatusPage::answer_api(std::string_view path, std::string_view query) {
  if (path == "fleet") return answer_fleet();
  constexpr std::string_view kPulls = "pulls/";
  const bool is_pull = path.starts_with(kPulls);
  if (path != "events" && !is_pull) {
    return error_answer(404, "no such answer; there are fleet, pulls/ID and events?after=N");
  }
  const auto leads = term_ ? term_->may_answer ? term_->may_answer() : Result<void>()
                           : Result<void>(fail(ErrorCode::kUnavailable, "{}", standing_by_));
  if (!leads) return error_answer(503, leads.error().message());
  if (!is_pull) {
    return {200, events_json(term_->watch, number_in(query, "after"))};
  }
  PullId id;
  if (!from_hex(path.substr(kPulls.size()), id.bytes.data(), id.bytes.size())) {
    return error_answer(404, "the id of a pull is 32 hexadecimal digits");
  }
  return {200, pull_json(term_->core, id, this_moment())};
}

Moment StatusPage::this_moment() {
  const TimePoint now = steady_now();
  const Duration to_wall =
      std::chrono::system_clock::now().time_since_epoch() - now.time_since_epoch();
  if (std::chrono::abs(to_wall - to_wall_) > kClockSlack) to_wall_ = to_wall;
  return {now, WallTime(now.time_since_epoch() + to_wall_)};
}

rpc::HttpAnswer StatusPage::answer_fleet() {
  if (!term_) return {200, standby_json(standing_by_)};
  if (term_->may_answer) {
    if (const auto leads = term_->may_answer(); !leads) {
      return {200, standby_json(leads.error().message())};
    }
  }
  const Moment moment = this_moment();
  if (fleet_.etag.empty() || moment.now - fleet_.made >= kFleetKept) {
    fleet_.body = fleet_json(term_->core, term_->watch, moment);
    fleet_.etag = fmt::format("{:x}", std::hash<std::string>()(fleet_.body));
    fleet_.made = moment.now;
  }
  rpc::HttpAnswer answer{200, fleet_.body};
  answer.etag = fleet_.etag;
  return answer;
}

}  // namespace rekindle::coordinator
