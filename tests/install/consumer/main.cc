// A program outside of the tree that embeds an agent.
#include <cstdio>
#include <string_view>

#include "recovery/agent/local_agent.h"
#include "src/base/version.h"

int main(int argc, char** argv) {
  if (argc == 2 && std::string_view(argv[1]) == "--command") {
    std::puts(REKINDLE_COMMAND);
    return 0;
  }
  if (argc != 3) return 2;
  rekindle::agent::LocalAgentOptions options;
  options.store_directory = argv[1];
  auto agent = rekindle::agent::open_local_agent(options);
  if (!agent) {
    std::fprintf(stderr, "%s\n", agent.error().message().c_str());
    return 1;
  }
  rekindle::agent::PublishRequest request;
  request.id = {"consumer", 1};
  request.paths = {argv[2]};
  const auto published = (*agent)->publish(request, [](const rekindle::agent::Progress&) {});
  if (!published) {
    std::fprintf(stderr, "%s\n", published.error().message().c_str());
    return 1;
  }
  std::printf("%.*s published %s, root %s\n", static_cast<int>(rekindle::software_version().size()),
              rekindle::software_version().data(), published->id.to_string().c_str(),
              published->root.hex().c_str());
  return 0;
}
