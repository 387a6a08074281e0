#include "recovery/rpc/audited_calls.h"

#include <cctype>
#include <string_view>

#include <boost/asio/associated_executor.hpp>
#include <boost/asio/async_result.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "recovery/rpc/handshake.h"
#include "recovery/rpc/rights.h"
#include "src/base/clock.h"
#include "src/base/log.h"

namespace rekindle::rpc {

namespace {

// "begin_update" for COORDINATOR_BEGIN_UPDATE.
std::string act_of(proto::Method method) {
  std::string name = proto::Method_Name(method);
  constexpr std::string_view kPrefix = "COORDINATOR_";
  if (name.starts_with(kPrefix)) name.erase(0, kPrefix.size());
  for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return name;
}

}  // namespace

AuditEntry audit_entry(const Peer& peer, std::string act, std::string object,
                       const Result<void>& outcome) {
  AuditEntry entry;
  entry.act = std::move(act);
  if (!outcome) entry.result = outcome.error().message();
  entry.object = std::move(object);
  entry.principals = principals_of(peer);
  entry.role = role_name(peer.role);
  entry.node = peer.node_id;
  entry.address = peer.address;
  return entry;
}

void AuditedCalls::note(const AuditEntry& entry) {
  if (audit_ != nullptr) audit_->write(entry);
}

void AuditedCalls::note_some(AuditEntry entry) {
  if (audit_ != nullptr) audit_->write_some(std::move(entry), steady_now());
}

void AuditedCalls::reloaded(const Result<void>& outcome) {
  if (audit_ == nullptr) return;
  if (const auto reopened = audit_->reopen(); !reopened) {
    log::error("audit.not_reopened", "why", reopened.error(), "effect", "the old file goes on");
  }
  audit_->write({.act = "reload", .result = outcome ? "ok" : outcome.error().message()});
}

Result<void> AuditedCalls::admit(const Peer&, const MethodRule& rule, const CallObject&) {
  if (audit_ == nullptr || !rule.audited) return {};
  return audit_->check();
}

void AuditedCalls::denied(const Peer& peer, proto::Method method, const CallObject& object,
                          const Error& why) {
  note_some(audit_entry(peer, act_of(method), object.text, fail(Error(why))));
}

void AuditedCalls::ended(const Peer& peer, proto::Method method, const CallObject& object,
                         const Result<void>& outcome) {
  note(audit_entry(peer, act_of(method), object.text, outcome));
}

void AuditedCalls::refused(const std::string& address, const Error& why) {
  AuditEntry entry;
  entry.act = "connect";
  entry.result = why.message();
  entry.address = address;
  note_some(std::move(entry));
}

async::Task<Result<void>> AuditedCalls::settle() {
  if (audit_ == nullptr) co_return Result<void>();
  auto initiate = [log = audit_.get()](auto handler) {
    // std::function copies, and a handler can only be moved.
    auto shared = std::make_shared<decltype(handler)>(std::move(handler));
    auto executor = boost::asio::get_associated_executor(*shared);
    log->when_on_disk([shared, executor](Result<void> done) {
      boost::asio::post(executor, [shared, done] { std::move (*shared)(done); });
    });
  };
  co_return co_await boost::asio::async_initiate<const boost::asio::use_awaitable_t<>,
                                                 void(Result<void>)>(initiate,
                                                                     boost::asio::use_awaitable);
}

}  // namespace rekindle::rpc
