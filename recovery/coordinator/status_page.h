#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include <boost/asio/any_io_executor.hpp>

#include "recovery/coordinator/core/core.h"
#include "recovery/coordinator/core/fleet_watch.h"
#include "recovery/coordinator/fleet_json.h"
#include "recovery/rpc/http_server.h"
#include "src/async/task.h"

namespace rekindle::coordinator {

// The status page and its API, for people (docs/internals/status-page.md). It lives as long as the
// process; a coordinator that stands by says who leads. It reads, and changes nothing. Control
// thread only.
class StatusPage {
 public:
  // What a page shows while this coordinator leads. All of it outlives the term.
  struct Term {
    const Core& core;
    const FleetWatch& watch;
    // An error: another coordinator may lead by now.
    const std::function<Result<void>()>& may_answer;
  };

  // `access`: http_access() of this address.
  Result<void> listen(const boost::asio::any_io_executor& executor, const std::string& address,
                      rpc::HttpAccess access);
  async::Task<void> close(std::chrono::milliseconds deadline);
  // "": it listens nowhere.
  const std::string& address() const { return address_; }

  void begin_term(const Term& term) { term_.emplace(term); }
  void end_term() {
    term_.reset();
    fleet_ = {};
  }
  void stand_by(std::string why) { standing_by_ = std::move(why); }

 private:
  rpc::HttpAnswer answer(const rpc::HttpRequest& request);
  rpc::HttpAnswer answer_api(std::string_view path, std::string_view query);
  rpc::HttpAnswer answer_fleet();
  Moment this_moment();
  bool is_own_name(std::string_view host) const;

  // Many viewers cost as much as one.
  struct Cached {
    std::string body;
    std::string etag;
    TimePoint made;
  };

  std::string address_;
  // The host that the address was given with.
  std::string host_;
  std::optional<Term> term_;
  std::string standing_by_ = "this coordinator has just started";
  Cached fleet_;
  // From the monotonic clock to the system's. Kept while it is about right, so that a moment of the
  // past stays the same number.
  Duration to_wall_{};
  std::unique_ptr<rpc::HttpServer> server_;
};

}  // namespace rekindle::coordinator
