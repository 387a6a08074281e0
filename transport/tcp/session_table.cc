#include "transport/tcp/session_table.h"

namespace rekindle::transport::tcp {

std::shared_ptr<SessionShare> SessionTable::open_stream(const SessionToken& token,
                                                        std::uint64_t bytes_per_second) {
  const std::lock_guard lock(mutex_);
  auto& share = shares_[token];
  if (!share) share = std::make_shared<SessionShare>(bytes_per_second);
  if (share->streams >= max_streams_) return nullptr;
  share->limiter.set_rate(bytes_per_second);
  ++share->streams;
  return share;
}

void SessionTable::close_stream(const SessionToken& token) {
  const std::lock_guard lock(mutex_);
  const auto found = shares_.find(token);
  if (found != shares_.end() && --found->second->streams == 0) shares_.erase(found);
}

}  // namespace rekindle::transport::tcp
