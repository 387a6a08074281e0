#include "tools/cli/arguments.h"

#include <array>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <iterator>

#include <unistd.h>

#include <pwd.h>

#include "recovery/agent/agent_core.h"
#include "recovery/rpc/address.h"
#include "src/base/units.h"
#include "tools/cli/output.h"

namespace rekindle::cli {

Result<std::chrono::milliseconds> parse_duration(std::string_view option, std::string_view text) {
  double value = 0;
  const char* const last = text.data() + text.size();
  auto [end, error] = std::from_chars(text.data(), last, value);
  const std::string_view unit(end, static_cast<std::size_t>(last - end));
  const double factor = unit == "ms"                   ? 1
                        : unit == "s"                  ? 1e3
                        : unit == "m" || unit == "min" ? 60e3
                        : unit == "h"                  ? 3600e3
                                                       : 0;
  const bool is_zero = error == std::errc() && value == 0 && unit.empty();
  if (is_zero) return std::chrono::milliseconds(0);
  constexpr double kLongest = 366 * 86'400e3;
  if (error != std::errc() || factor == 0 || !(value >= 0) || value * factor > kLongest) {
    return fail(ErrorCode::kInvalid, "{}: '{}' is not a time; write for example 250ms, 2s or 5min",
                option, text);
  }
  return std::chrono::milliseconds(static_cast<std::int64_t>(value * factor));
}

Result<std::uint64_t> parse_size(std::string_view option, std::string_view text) {
  auto bytes = parse_bytes(text);
  if (!bytes) return fail(std::move(bytes).error().with_context(option));
  return bytes;
}

Result<uid_t> parse_user(std::string_view option, const std::string& text) {
  uid_t number = 0;
  const char* const last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, number);
  if (error == std::errc() && end == last && number != static_cast<uid_t>(-1)) return number;
  passwd entry{};
  passwd* found = nullptr;
  std::array<char, 4096> buffer;
  if (::getpwnam_r(text.c_str(), &entry, buffer.data(), buffer.size(), &found) == 0 &&
      found != nullptr) {
    return entry.pw_uid;
  }
  return fail(ErrorCode::kInvalid, "{}: there is no user '{}' here; give a name or a number",
              option, text);
}

Result<void> check_address(std::string_view option, const std::string& text) {
  auto parsed = rpc::HostPort::parse(text);
  if (!parsed) return fail(std::move(parsed).error().with_context(option));
  return {};
}

Result<void> check_addresses(std::string_view option, const std::string& text) {
  auto parsed = rpc::parse_addresses(text);
  if (!parsed) return fail(std::move(parsed).error().with_context(option));
  return {};
}

Result<std::string> read_text_file(const std::filesystem::path& path) {
  constexpr std::size_t kMaxBytes = 16 << 20;
  std::ifstream file(path, std::ios::binary);
  if (!file) return fail_errno(errno, path.string());
  std::string text(kMaxBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad()) return fail(ErrorCode::kInvalid, "{}: cannot be read", path.string());
  text.resize(static_cast<std::size_t>(file.gcount()));
  if (text.size() > kMaxBytes) {
    return fail(ErrorCode::kInvalid, "{}: larger than {}", path.string(), format_bytes(kMaxBytes));
  }
  return text;
}

Result<ModelVersion> parse_model_version(std::string_view text) {
  TRY(const ModelRef ref, ModelRef::parse(text));
  if (!ref.version) {
    return fail(ErrorCode::kInvalid, "'{}' names no version; write {}@1", text, ref.model);
  }
  return ModelVersion{ref.model, *ref.version};
}

std::filesystem::path default_state_directory() {
  const auto given = [](const char* name) {
    const char* value = std::getenv(name);
    return value != nullptr ? std::string_view(value) : std::string_view();
  };
  if (const auto unit = given("STATE_DIRECTORY"); !unit.empty()) return unit;
  if (::geteuid() == 0) return "/var/lib/rekindle/coordinator";
  if (const auto state = given("XDG_STATE_HOME"); !state.empty()) {
    return std::filesystem::path(state) / "rekindle/coordinator";
  }
  const auto home = given("HOME");
  return std::filesystem::path(home.empty() ? "/tmp" : home) / ".local/state/rekindle/coordinator";
}

trace::Context outer_trace() {
  const char* const text = std::getenv("TRACEPARENT");
  return text == nullptr ? trace::Context()
                         : trace::Context::parse(text).value_or(trace::Context());
}

Result<CommandSpan> begin_span(const std::string& name, const std::string& otlp) {
  CommandSpan begun;
  const std::string node = fmt::format("{}-{}", agent::default_node_id(), ::getpid());
  TRY(begun.tracing, rpc::Tracing::create("command", node, otlp));
  begun.span = trace::RunningSpan(&begun.tracing->tracer, name, outer_trace());
  return begun;
}

void add_credential_words(const Settings& settings, std::vector<std::string>& words) {
  const rpc::CredentialOptions& all = settings.credentials;
  const auto add = [&](const char* option, const std::string& path) {
    if (!path.empty()) words.insert(words.end(), {option, path});
  };
  add("--secret-file", all.secret_file);
  add("--tls-cert", all.certificate_file);
  add("--tls-key", all.key_file);
  add("--tls-ca", all.authority_file);
  add("--tls-crl", all.revocation_file);
  if (all.admit_protocol_2) words.emplace_back("--admit-protocol-2");
}

agent::LocalAgentOptions local_agent_options(const Settings& settings) {
  agent::LocalAgentOptions options;
  options.store_directory = settings.store;
  options.coordinator = settings.coordinator;
  options.credentials = settings.credentials;
  return options;
}

}  // namespace rekindle::cli
