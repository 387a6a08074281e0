#pragma once

#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <tl/expected.hpp>

// Errors are values. A code says what the caller can do next, the message is the one line that a
// user sees: what failed, on what, why, what to do.
namespace rekindle {

enum class ErrorCode {
  kInvalid,      // the input is wrong: fix it, do not retry
  kNotFound,     // the thing named does not exist
  kTimeout,      // no progress by the deadline: try another way
  kPeerLost,     // the peer is gone: try another peer
  kStale,        // the peer, key or epoch is not the one that was meant: look it up again
  kCorrupt,      // bytes do not match their digest: fetch them elsewhere
  kExhausted,    // out of memory, space, descriptors or quota: free some or wait
  kDenied,       // not allowed: fix rights or secrets
  kUnavailable,  // not now: retry with back-off
  kInternal,     // a bug, or a file or device of this host that fails: look at it
};

std::string_view to_string(ErrorCode code);

class Error {
 public:
  Error(ErrorCode code, std::string message) : code_(code), message_(std::move(message)) {}

  ErrorCode code() const { return code_; }
  // One line; outer context first: "pull qwen3@41: connect 10.0.0.3:7400: connection refused".
  const std::string& message() const { return message_; }

  Error with_context(std::string_view context) && {
    message_.insert(0, fmt::format("{}: ", context));
    return std::move(*this);
  }
  Error with_context(std::string_view context) const& {
    return Error(code_, fmt::format("{}: {}", context, message_));
  }

 private:
  ErrorCode code_;
  std::string message_;
};

template <typename T>
class [[nodiscard]] Result : public tl::expected<T, Error> {
 public:
  using tl::expected<T, Error>::expected;
};

using Failure = tl::unexpected<Error>;

template <typename... Args>
[[nodiscard]] Failure fail(ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
  return Failure(Error(code, fmt::format(format, std::forward<Args>(args)...)));
}
[[nodiscard]] inline Failure fail(Error error) { return Failure(std::move(error)); }

// An Error from errno (or a verbs return code): chooses the code, appends strerror.
Error errno_error(int error_number, std::string_view what);
[[nodiscard]] inline Failure fail_errno(int error_number, std::string_view what) {
  return Failure(errno_error(error_number, what));
}

}  // namespace rekindle

#define REKINDLE_CONCAT_INNER(a, b) a##b
#define REKINDLE_CONCAT(a, b) REKINDLE_CONCAT_INNER(a, b)

// TRY(auto x, f());  declares x, or returns f's error.  TRY_VOID(f()); for Result<void>.
// The CO_ forms are for coroutines: CO_TRY(auto x, co_await f());
#define REKINDLE_TRY_IMPL(tmp, declaration, expression, leave) \
  auto&& tmp = (expression);                                   \
  if (!tmp) leave ::rekindle::fail(std::move(tmp).error());    \
  declaration = std::move(*tmp)
#define TRY(declaration, expression) \
  REKINDLE_TRY_IMPL(REKINDLE_CONCAT(try_result_, __LINE__), declaration, expression, return )
#define CO_TRY(declaration, expression) \
  REKINDLE_TRY_IMPL(REKINDLE_CONCAT(try_result_, __LINE__), declaration, expression, co_return )
#define TRY_VOID(expression)                                  \
  do {                                                        \
    if (auto&& try_result = (expression); !try_result)        \
      return ::rekindle::fail(std::move(try_result).error()); \
  } while (false)
#define CO_TRY_VOID(expression)                                                 \
  do {                                                                          \
    auto&& try_result = (expression);                                           \
    if (!try_result) co_return ::rekindle::fail(std::move(try_result).error()); \
  } while (false)
