#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include <sys/types.h>

#include "src/base/ids.h"
#include "src/base/result.h"
#include "transport/session_hello.h"

struct ssl_st;

namespace rekindle::transport::tcp {

// TLS 1.3 on one data stream. The token of the session is the pre-shared key, so neither end needs
// a certificate, and both have proven the token when the handshake is over. The kernel makes the
// records where it can (kTLS). One thread at a time uses it. It never blocks, and owns no socket.
// The process ignores SIGPIPE.
class DataTls {
 public:
  // The first byte of a stream with TLS.
  static constexpr std::byte kFirstByte{22};
  // A record carries so many bytes at most.
  static constexpr std::size_t kRecordBytes = 16 << 10;

  using FindToken = std::function<std::optional<SessionToken>(const SessionHandle&)>;
  // `fd` outlives the object.
  static Result<std::unique_ptr<DataTls>> connect(int fd, const SessionToken& token);
  static Result<std::unique_ptr<DataTls>> accept(int fd, FindToken find_token);
  ~DataTls();
  DataTls(const DataTls&) = delete;
  DataTls& operator=(const DataTls&) = delete;

  enum class Io { kDone, kWantsRead, kWantsWrite, kBroken };
  Io handshake();
  // After kBroken.
  const std::string& broken_reason() const { return broken_reason_; }
  // After the handshake: the token that both ends have proven.
  const SessionToken& token() const { return token_; }

  // Like recv() and send() with MSG_DONTWAIT. A send() that ended with EAGAIN is called again with
  // the same bytes, or with more after them. EPROTO: the peer broke the rules.
  ssize_t receive(std::span<std::byte> into);
  ssize_t send(std::span<const std::byte> bytes);
  // The kernel encrypts what send(2), sendmsg(2) and sendfile(2) put into the socket.
  bool kernel_sends() const;
  bool kernel_receives() const;

 private:
  struct Free {
    void operator()(ssl_st* ssl) const;
  };
  struct Callbacks;
  DataTls() = default;
  ssize_t failed(int result);

  std::unique_ptr<ssl_st, Free> ssl_;
  FindToken find_token_;  // of the accepting end
  SessionToken token_;
  std::string broken_reason_;
};

}  // namespace rekindle::transport::tcp
