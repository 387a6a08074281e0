#include <cstdio>
#include <memory>
#include <optional>
#include <string>

#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <fmt/format.h>
#include <termios.h>

#include "src/base/clock.h"
#include "tools/cli/arguments.h"
#include "tools/cli/cli_session.h"
#include "tools/cli/command_line.h"
#include "tools/cli/output.h"
#include "tools/cli/remote.h"
#include "tools/cli/status_view.h"
#include "tools/cli/top_view.h"

namespace rekindle::cli {
namespace {

constexpr std::chrono::milliseconds kShortestFrame{100};
// How often keys are looked for.
constexpr std::chrono::milliseconds kLookAtKeys{50};

struct TopArgs {
  std::string interval = "1s";
  std::uint32_t frames = 0;
};

// The terminal's other screen without a cursor, and keys without Enter, until this object ends.
class Screen {
 public:
  Screen() {
    if (::tcgetattr(STDIN_FILENO, &before_) == 0) {
      termios keys = before_;
      keys.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
      has_keys_ = ::tcsetattr(STDIN_FILENO, TCSANOW, &keys) == 0;
    }
    print("\x1b[?1049h\x1b[?25l");
  }
  ~Screen() {
    print("\x1b[?25h\x1b[?1049l");
    (void)std::fflush(stdout);
    if (has_keys_) (void)::tcsetattr(STDIN_FILENO, TCSANOW, &before_);
  }
  Screen(const Screen&) = delete;
  Screen& operator=(const Screen&) = delete;

  void show(const std::string& frame) const { print("\x1b[H\x1b[2J" + frame); }

  // A key that was pressed; 0: none.
  char key() const {
    pollfd input{STDIN_FILENO, POLLIN, 0};
    char key = 0;
    if (!has_keys_ || ::poll(&input, 1, 0) != 1 || ::read(STDIN_FILENO, &key, 1) != 1) return 0;
    return key;
  }

  static std::size_t height() {
    winsize size{};
    // The last line stays free, so that the terminal does not scroll.
    if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_row < 3) return 23;
    return size.ws_row - 1u;
  }

 private:
  termios before_{};
  bool has_keys_ = false;
};

class Top {
 public:
  Top(const Settings& settings, Remote& remote) : settings_(settings), remote_(remote) {
    if (terminal(STDOUT_FILENO) && !settings.json) screen_.emplace();
  }

  // False: nobody reads any more.
  Result<bool> show() {
    if (!paused_) status_ = remote_.call<proto::COORDINATOR_STATUS>({});
    if (settings_.json) {
      print_json_line(*status_ ? to_json(**status_) : to_json(status_->error()));
    } else if (screen_) {
      screen_->show(frame(terminal_width(STDOUT_FILENO), Screen::height()));
    } else {
      print(frame(SIZE_MAX, 0) + "\n");
    }
    TRY_VOID(flush_output());
    return std::ferror(stdout) == 0;
  }

  enum class Asked { kNothing, kFrame, kEnd };
  Asked look_at_keys() {
    switch (screen_ ? screen_->key() : 0) {
      case 'q':
        return Asked::kEnd;
      case 'p':
        paused_ = !paused_;
        return Asked::kFrame;
      case 's':
        order_ = order_ == TopOrder::kRate ? TopOrder::kName : TopOrder::kRate;
        return Asked::kFrame;
      default:
        return Asked::kNothing;
    }
  }

 private:
  std::string frame(std::size_t width, std::size_t height) const {
    if (!*status_) return "rekindle top: " + printable(status_->error().message()) + "\n";
    const std::string title = printable(remote_.address());
    if (!screen_) return top_frame(**status_, order_, title, width, height);
    return fmt::format("q: end, p: {}, s: sort by {}\n", paused_ ? "go on" : "pause",
                       order_ == TopOrder::kRate ? "name" : "rate") +
           top_frame(**status_, order_, title, width, height - 1);
  }

  const Settings& settings_;
  Remote& remote_;
  std::optional<Screen> screen_;
  std::optional<Result<proto::ClusterStatusResponse>> status_;
  TopOrder order_ = TopOrder::kRate;
  bool paused_ = false;
};

// An unreachable coordinator does not end it.
Result<int> top(const Settings& settings, const TopArgs& args) {
  TRY(const auto interval, parse_duration("--interval", args.interval));
  if (interval < kShortestFrame) {
    return fail(ErrorCode::kInvalid, "--interval: {} is too short, 100ms is the shortest",
                args.interval);
  }
  if (settings.coordinator.empty()) {
    return fail(ErrorCode::kInvalid,
                "top shows a fleet: name its coordinator with --coordinator HOST:PORT or "
                "REKINDLE_COORDINATOR");
  }
  TRY(const auto remote, Remote::create(settings, settings.coordinator));
  const Interrupts interrupts;
  Top shown(settings, *remote);
  for (std::uint32_t frames = 1;; ++frames) {
    TRY(const bool read, shown.show());
    if (!read || frames == args.frames) return kExitOk;
    const TimePoint next = steady_now() + interval;
    while (steady_now() < next) {
      if (interrupts.within(std::min(interval, kLookAtKeys))) return kExitOk;
      const Top::Asked asked = shown.look_at_keys();
      if (asked == Top::Asked::kEnd) return kExitOk;
      if (asked == Top::Asked::kFrame) break;
    }
  }
}

}  // namespace

void add_top(Command& app, Session& session) {
  Command sub = app.command(
      "top",
      "Show the fleet live, what is wrong first: hosts with their rates, pulls with what is left,\n"
      "and updates. Keys: q ends it, p pauses, s sorts by rate or name. Elsewhere than on a\n"
      "terminal it prints one frame after the other.");
  auto args = std::make_shared<TopArgs>();
  sub.option("--interval", args->interval, "Time between two frames [1s]").type_name("TIME");
  sub.option("-n,--frames", args->frames, "End after N frames; 0: go on [0]").type_name("N");
  sub.runs(session, "top", [&session, args] { return top(session.settings, *args); });
}

}  // namespace rekindle::cli
