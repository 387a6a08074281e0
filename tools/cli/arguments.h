#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include <sys/types.h>

#include "recovery/agent/local_agent.h"
#include "recovery/rpc/otlp_exporter.h"
#include "src/base/result.h"
#include "tools/cli/cli_session.h"

namespace rekindle::cli {

// Values of options; the error names the option.
Result<std::chrono::milliseconds> parse_duration(std::string_view option, std::string_view text);
Result<std::uint64_t> parse_size(std::string_view option, std::string_view text);
// The number of a user: 1000, or by name.
Result<uid_t> parse_user(std::string_view option, const std::string& text);
// HOST:PORT.
Result<void> check_address(std::string_view option, const std::string& text);
// HOST:PORT,HOST:PORT.
Result<void> check_addresses(std::string_view option, const std::string& text);
// A text file of at most 16 MiB.
Result<std::string> read_text_file(const std::filesystem::path& path);
// MODEL@VERSION with the version required.
Result<ModelVersion> parse_model_version(std::string_view text);
// The directory of a coordinator's state without --state.
std::filesystem::path default_state_directory();

// The span of a command, and the tracer of its process.
struct CommandSpan {
  std::unique_ptr<rpc::Tracing> tracing;
  trace::RunningSpan span;
};
// The parent that TRACEPARENT in the environment names. Anything but a W3C trace context is
// ignored.
trace::Context outer_trace();
// `otlp`: of --otlp. Its parent is outer_trace().
Result<CommandSpan> begin_span(const std::string& name, const std::string& otlp);

// Adds the options of the settings' credentials, for a command that this one starts.
void add_credential_words(const Settings& settings, std::vector<std::string>& words);
agent::LocalAgentOptions local_agent_options(const Settings& settings);

}  // namespace rekindle::cli
