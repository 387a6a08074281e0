#include "src/base/result.h"

#include <cerrno>
#include <system_error>

namespace rekindle {

std::string_view to_string(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalid:
      return "INVALID";
    case ErrorCode::kNotFound:
      return "NOT_FOUND";
    case ErrorCode::kTimeout:
      return "TIMEOUT";
    case ErrorCode::kPeerLost:
      return "PEER_LOST";
    case ErrorCode::kStale:
      return "STALE";
    case ErrorCode::kCorrupt:
      return "CORRUPT";
    case ErrorCode::kExhausted:
      return "EXHAUSTED";
    case ErrorCode::kDenied:
      return "DENIED";
    case ErrorCode::kUnavailable:
      return "UNAVAILABLE";
    case ErrorCode::kInternal:
      return "INTERNAL";
  }
  return "INTERNAL";
}

namespace {

ErrorCode code_of_errno(int error_number) {
  switch (error_number) {
    case ENOENT:
    case ENODEV:
    case ENXIO:
      return ErrorCode::kNotFound;
    case EINVAL:
    case ENAMETOOLONG:
    case ENOTDIR:
    case EISDIR:
    case ELOOP:
    case ENOTEMPTY:
      return ErrorCode::kInvalid;
    case EACCES:
    case EPERM:
    case EROFS:
      return ErrorCode::kDenied;
    case ENOMEM:
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
    case EMFILE:
    case ENFILE:
    case ENOBUFS:
      return ErrorCode::kExhausted;
    case ETIMEDOUT:
      return ErrorCode::kTimeout;
    case ECONNREFUSED:
    case ECONNRESET:
    case ECONNABORTED:
    case EPIPE:
    case EHOSTUNREACH:
    case ENETUNREACH:
    case ENOTCONN:
      return ErrorCode::kPeerLost;
    case EIO:
    case EUCLEAN:
      return ErrorCode::kInternal;
    default:
      return ErrorCode::kUnavailable;
  }
}

}  // namespace

Error errno_error(int error_number, std::string_view what) {
  return {code_of_errno(error_number),
          fmt::format("{}: {}", what, std::generic_category().message(error_number))};
}

}  // namespace rekindle
