#pragma once

#include <functional>
#include <string>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/steady_timer.hpp>

#include "recovery/coordinator/coordinator.h"
#include "recovery/coordinator/core/types.h"
#include "recovery/coordinator/durable_store.h"
#include "recovery/rpc/rpc.h"

namespace rekindle::coordinator {

// Set once, waited for by anybody on one executor.
class Stop {
 public:
  explicit Stop(boost::asio::any_io_executor executor);
  void set(std::string why);
  bool is_set() const { return set_; }
  const std::string& why() const { return why_; }
  async::Task<void> wait();

 private:
  boost::asio::steady_timer timer_;
  bool set_ = false;
  std::string why_;
};

struct TermOptions {
  const CoordinatorOptions& options;
  Timing timing;
  std::string secret;
  // Asked before each answer; an error is the answer instead. Empty: nobody else can lead.
  std::function<Result<void>()> may_answer = {};
};

// Leads from the state in `store`, with its epoch + 1, until `stop` is set. Sets it when a write
// shows that another coordinator leads.
async::Task<Result<void>> lead_term(const TermOptions& options, DurableStore& store, Stop& stop);

}  // namespace rekindle::coordinator
