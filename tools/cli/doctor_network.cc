#include <cerrno>
#include <cstring>

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "recovery/rpc/grants.h"
#include "src/base/unique_fd.h"
#include "tools/cli/doctor.h"

namespace rekindle::cli::doctor {

Check check_port(const std::string& what, std::uint16_t port) {
  Check check{fmt::format("port {}", port), Level::kOk, "free for " + what, ""};
  const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    check.level = Level::kWarn;
    check.found = fmt::format("not free for {}: {}", what, std::strerror(errno));
    check.advice = fmt::format(
        "fine when {} runs here already (see `ss -ltnp sport = :{}`); else give --listen", what,
        port);
  }
  return check;
}

Check check_secret(const std::string& path) {
  if (path.empty()) {
    return {"secret", Level::kWarn, "none: whoever reaches the ports may pull and publish",
            "make one for all hosts: head -c 32 /dev/urandom | base64 > FILE; chmod 600 FILE; then "
            "--secret-file FILE"};
  }
  if (const auto secret = rpc::read_secret(path); !secret) {
    return {"secret", Level::kFail, secret.error().message(), "mode 0600, 16 to 4096 bytes"};
  }
  return {"secret", Level::kOk, path, ""};
}

}  // namespace rekindle::cli::doctor
