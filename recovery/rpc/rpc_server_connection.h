#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include <boost/asio/any_io_executor.hpp>

#include "recovery/rpc/method_rules.h"
#include "recovery/rpc/peer_budgets.h"
#include "recovery/rpc/rpc.h"
#include "recovery/rpc/rpc_connection.h"
#include "src/async/task_group.h"

namespace rekindle::rpc {

// The state that all connections of a server share. On the executor's one thread.
struct ServerShared {
  struct Method {
    Handler handler;
    // Instead of the coroutine.
    InstantHandler at_once;
    bool local_only = false;
  };
  ServerShared(boost::asio::any_io_executor executor, Identity who, ServerLimits server_limits)
      : identity(std::move(who)), limits(server_limits), tasks(std::move(executor)) {}

  Identity identity;
  ServerLimits limits;
  // Fixed once the server listens.
  std::unordered_map<std::uint32_t, Method> methods;
  std::function<void(const Peer&)> on_peer_closed;
  // May this peer, whose hello was accepted, have one more connection?
  std::function<Result<std::shared_ptr<const void>>(const Peer&)> admit;
  RateBudgets rates;
  LargeFrames large_frames;
  // Bytes of answers that each peer has yet to read, on all of its connections.
  std::shared_ptr<std::size_t> unread_of(const std::string& budget_key);
  std::map<std::string, std::weak_ptr<std::size_t>> unread;
  std::function<void(proto::Method, bool failed, Duration took)> on_call_ended;
  // nullptr: calls are not traced.
  trace::Tracer* tracer = nullptr;
  // nullptr: the roles alone decide.
  CallGuard* guard = nullptr;
  // Strangers must not fill the log.
  TimePoint next_refusal_log{};
  std::uint64_t unlogged_refusals = 0;
  // Connections and calls.
  async::TaskGroup tasks;
};

// The server's end of one connection: hello, then calls.
class ServerConnection : public std::enable_shared_from_this<ServerConnection> {
 public:
  ServerConnection(std::shared_ptr<ServerShared> shared, Socket socket, std::string address,
                   std::string unix_path);

  // Runs until the connection ends; `on_end` is called once, also on cancellation.
  static async::Task<void> serve(std::shared_ptr<ServerConnection> self,
                                 std::function<void()> on_end);
  void cancel_calls();
  void close(Error reason) { connection_->close(std::move(reason)); }
  void refuse_now(const Error& error) { connection_->refuse_now(error); }
  void hold(std::shared_ptr<const void> host_place) { host_place_ = std::move(host_place); }
  // Gives its places back at once.
  void make_way(const Error& error);
  bool greeted() const { return greeted_; }
  // Of its last request. nullopt: a call is open.
  std::optional<TimePoint> quiet_since() const {
    return calls_.empty() ? std::optional(last_request_) : std::nullopt;
  }
  const Peer& peer() const { return peer_; }
  // Of its address.
  const std::string& host() const { return host_; }
  const std::string& budget_key() const { return budget_key_; }
  bool is_unix() const { return !unix_path_.empty(); }

 private:
  struct Call;
  class Events;

  async::Task<Result<void>> greet();
  // TLS, or the end of a caller that has to use it.
  async::Task<Result<void>> secure();
  // The secret that a plain caller has to prove, empty for none.
  Result<crypto::Secret> plain_secret(const proto::Hello& theirs) const;
  async::Task<Result<void>> exchange_proofs(crypto::Secret secret, proto::Frame own,
                                            proto::Frame theirs);
  // May the peer make this call? Tells the guard of a refusal.
  Result<CallObject> admit(const proto::Request& request) const;
  void tell_guard(proto::Method method, const CallObject& object,
                  const Result<std::string>& result) const;
  // Whether the answer waits until the guard's line about the call is safe.
  bool settles(proto::Method method) const;
  Result<void> on_large_frame(std::string_view head, std::uint32_t frame_bytes);
  void on_request(proto::Request request, LargeFrames::Share share);
  Result<void> check_budget(const proto::Request& request);
  // The span of a call that belongs to a trace.
  trace::RunningSpan begin_span(const proto::Request& request) const;
  Peer caller_of(const trace::RunningSpan& span) const;
  Result<std::string> answer_at_once(const ServerShared::Method& method,
                                     const proto::Request& request) const;
  void count(std::uint32_t method, bool failed, TimePoint began) const;
  void on_call_deadline(const std::shared_ptr<Call>& call);
  static async::Task<void> run_call(std::shared_ptr<ServerConnection> self,
                                    std::shared_ptr<Call> call, const ServerShared::Method& method,
                                    std::string body);
  static async::Task<Result<std::string>> invoke(std::shared_ptr<ServerConnection> self,
                                                 std::shared_ptr<Call> call,
                                                 const ServerShared::Method& method,
                                                 std::string body);
  void respond(std::uint64_t call_id, Result<std::string> result);
  void respond_once(Call& call, Result<std::string> result);
  void end();

  std::shared_ptr<ServerShared> shared_;
  std::shared_ptr<Connection> connection_;
  // "" for TCP.
  std::string unix_path_;
  std::string host_;
  Peer peer_;
  bool greeted_ = false;
  bool uses_tls_ = false;
  // See peer_budgets.h.
  std::string budget_key_;
  // Among the connections that the server counts, by its budget_key() and by its address.
  std::shared_ptr<const void> place_;
  // nullptr: a process of the same user, which has no budget.
  std::shared_ptr<std::size_t> unread_;
  std::shared_ptr<const void> host_place_;
  // Of the frame that is being received.
  LargeFrames::Share receiving_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Call>> calls_;
  TimePoint last_request_ = steady_now();
};

}  // namespace rekindle::rpc
