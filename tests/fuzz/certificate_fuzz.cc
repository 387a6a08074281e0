#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <openssl/x509.h>

#include "recovery/rpc/rpc.h"
#include "recovery/rpc/tls.h"
#include "tests/fuzz/fuzz_check.h"

// A certificate in DER, or its names, one a line. A name that is taken has no character that could
// end a line of a log or a string, and a certificate of an agent is good for its own node only.
namespace {

using namespace rekindle;

constexpr std::string_view kNode = "gpu-7";

std::vector<std::string> lines_of(std::string_view text) {
  std::vector<std::string> lines;
  while (!text.empty()) {
    const auto end = std::min(text.find('\n'), text.size());
    lines.emplace_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

void check_names(const std::vector<std::string>& names) {
  rpc::Peer peer;
  peer.proof = rpc::Proof::kCertificate;
  peer.principals = names;
  for (const auto role :
       {proto::ROLE_AGENT, proto::ROLE_COORDINATOR, proto::ROLE_PULLER, proto::ROLE_CLIENT}) {
    peer.role = role;
    peer.node_id = kNode;
    const auto right = rpc::check_certified_name(peer, proto::ROLE_UNKNOWN);
    if (!right) continue;
    const std::string of_agent = rpc::certified_node(names, "agent");
    FUZZ_CHECK(of_agent.empty() || role != proto::ROLE_AGENT || of_agent == kNode);
    FUZZ_CHECK(of_agent.empty() || role == proto::ROLE_AGENT);
  }
  FUZZ_CHECK(rpc::trust_domain(names).find('/') == std::string::npos);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  check_names(lines_of({reinterpret_cast<const char*>(data), size}));
  const std::uint8_t* in = data;
  const std::unique_ptr<X509, decltype(&X509_free)> certificate(
      d2i_X509(nullptr, &in, static_cast<long>(size)), X509_free);
  if (certificate == nullptr) return 0;
  const auto names = rpc::names_of(certificate.get());
  for (const std::string& name : names) {
    FUZZ_CHECK(name.starts_with("spiffe://") || name.starts_with("dns:"));
    FUZZ_CHECK(std::ranges::all_of(name, [](char c) { return c > ' ' && c < 0x7f; }));
  }
  check_names(names);
  return 0;
}
