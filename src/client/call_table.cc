#include "src/client/call_table.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "src/ipc/frame.h"

namespace rekindle::client {

namespace {
constexpr std::size_t kMaxBacklogBytes = 8u << 20;
}  // namespace

Result<std::uint64_t> CallTable::queue(const Request& request, std::uint64_t session,
                                       std::chrono::milliseconds deadline,
                                       std::vector<UniqueFd> descriptors) {
  if (closed_) return fail(*closed_);
  if (outgoing_bytes_ + backlog_bytes_ > kMaxBacklogBytes) {
    return fail(ErrorCode::kUnavailable, "the agent does not read what it is sent");
  }
  const std::uint64_t call = ++last_call_;
  const auto ms = std::clamp<std::chrono::milliseconds::rep>(
      deadline.count(), 0, std::numeric_limits<std::uint32_t>::max());
  std::string body = encode({call, session, static_cast<std::uint32_t>(ms)}, request);
  if (body.size() > ipc::kMaxSpilledBytes) {
    return fail(ErrorCode::kInvalid, "a request of {} bytes, {} are allowed", body.size(),
                ipc::kMaxSpilledBytes);
  }
  outgoing_bytes_ += body.size();
  outgoing_.push_back({std::move(body), std::move(descriptors)});
  return call;
}

Result<std::uint64_t> CallTable::begin(const Request& request, std::uint64_t session,
                                       std::chrono::milliseconds deadline,
                                       const std::shared_ptr<Inbox>& inbox,
                                       std::vector<UniqueFd> descriptors) {
  const std::lock_guard lock(mutex_);
  TRY(const std::uint64_t call, queue(request, session, deadline, std::move(descriptors)));
  if (inbox) calls_[call] = inbox;
  return call;
}

std::optional<Message> CallTable::forget_call(std::uint64_t call, Inbox& inbox) {
  {
    const std::lock_guard lock(mutex_);
    if (calls_.erase(call) != 0) return std::nullopt;
  }
  return inbox.take_answer(call);
}

void CallTable::forget_session(std::uint64_t session, const std::shared_ptr<Inbox>& inbox) {
  const std::lock_guard lock(mutex_);
  sessions_.erase(session);
  std::erase_if(calls_, [&](const auto& call) { return call.second == inbox; });
}

std::vector<CallTable::Outgoing> CallTable::take_outgoing() {
  const std::lock_guard lock(mutex_);
  // Counted as backlog until the socket's own count replaces it.
  backlog_bytes_ += std::exchange(outgoing_bytes_, 0);
  return std::exchange(outgoing_, {});
}

void CallTable::set_backlog(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  backlog_bytes_ = bytes;
}

void CallTable::deliver(Message message) {
  const std::uint64_t session = message.agent.session;
  const bool begins = std::holds_alternative<AttachedReply>(message.agent.reply) ||
                      std::holds_alternative<PublishBegunReply>(message.agent.reply);
  std::shared_ptr<Inbox> inbox;
  {
    const std::lock_guard lock(mutex_);
    if (message.agent.call == 0) {
      const auto found = sessions_.find(session);
      if (found == sessions_.end()) return;
      inbox = found->second;
    } else {
      const auto found = calls_.find(message.agent.call);
      if (found == calls_.end()) return end_unwanted(message.agent);
      inbox = std::move(found->second);
      calls_.erase(found);
      if (begins && !message.agent.error) sessions_[session] = inbox;
    }
  }
  inbox->put(std::move(message));
}

void CallTable::end_unwanted(const AgentMessage& message) {
  if (std::holds_alternative<AttachedReply>(message.reply)) {
    (void)queue(DetachRequest{}, message.session, kNoDeadline);
  } else if (std::holds_alternative<PublishBegunReply>(message.reply)) {
    (void)queue(PublishAbandonRequest{}, message.session, kNoDeadline);
  }
}

void CallTable::close(const Error& why) {
  std::vector<std::shared_ptr<Inbox>> inboxes;
  {
    const std::lock_guard lock(mutex_);
    if (!closed_) closed_ = why;
    for (auto* const map : {&calls_, &sessions_}) {
      for (auto& [number, inbox] : *map) inboxes.push_back(std::move(inbox));
      map->clear();
    }
    outgoing_.clear();
  }
  for (const auto& inbox : inboxes) inbox->close(why);
}

}  // namespace rekindle::client
