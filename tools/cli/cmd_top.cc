#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>

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
// The screen then says for how long there is no answer.
constexpr std::chrono::milliseconds kMissedAfter{1000};
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
    if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_row < 4) return 23;
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
    remote_.while_waiting([this] {
      draw();
      return serve_input();
    });
  }

  // One frame with news. False: it was asked to end, or nobody reads any more.
  Result<bool> show() {
    if (!paused_) ask();
    if (ended_) return false;
    if (screen_) {
      draw();
    } else if (settings_.json) {
      print_json_line(problem_ ? to_json(*problem_) : to_json(*status_));
    } else {
      print(problem_
                ? "rekindle top: " + printable(problem_->message()) + "\n"
                : top_frame(*status_, order_, printable(remote_.address()), SIZE_MAX, 0) + "\n");
    }
    TRY_VOID(flush_output());
    return std::ferror(stdout) == 0;
  }

  // Serves keys, signals and the size of the terminal meanwhile. False: it was asked to end.
  bool rest(std::chrono::milliseconds pause) {
    const TimePoint end = steady_now() + pause;
    while (serve_input() && steady_now() < end && !std::exchange(anew_, false)) {
      (void)interrupts_.within(std::min(pause, kLookAtKeys));
    }
    return !ended_;
  }

 private:
  void ask() {
    if (!unanswered_since_) unanswered_since_ = steady_now();
    auto answer = remote_.call<proto::COORDINATOR_STATUS>({});
    if (answer) {
      status_ = std::move(*answer);
      unanswered_since_.reset();
      problem_.reset();
    } else {
      problem_ = std::move(answer).error();
    }
  }

  // False: it was asked to end.
  bool serve_input() {
    if (interrupts_.within(std::chrono::milliseconds(0))) ended_ = true;
    switch (screen_ && !ended_ ? screen_->key() : 0) {
      case 'q':
        ended_ = true;
        break;
      case 'p':
        paused_ = !paused_;
        // What happened meanwhile is shown at once.
        anew_ = !paused_;
        break;
      case 's':
        order_ = order_ == TopOrder::kRate ? TopOrder::kName : TopOrder::kRate;
        break;
      default:
        break;
    }
    draw();
    return !ended_;
  }

  // Does nothing while the same frame is on a screen of the same size.
  void draw() {
    if (!screen_) return;
    Drawn next{terminal_width(STDOUT_FILENO), Screen::height(), ""};
    next.frame = frame(next.width, next.height);
    if (next == drawn_) return;
    screen_->show(next.frame);
    (void)std::fflush(stdout);
    drawn_ = std::move(next);
  }

  std::string frame(std::size_t width, std::size_t height) const {
    std::string text = fmt::format("q: end, p: {}, s: sort by {}\n", paused_ ? "go on" : "pause",
                                   order_ == TopOrder::kRate ? "name" : "rate");
    std::size_t lines = 1;
    const Duration away = unanswered_since_ ? steady_now() - *unanswered_since_ : Duration::zero();
    if (problem_ || away >= kMissedAfter) {
      const std::string line = fmt::format(
          "no answer for {} s{}", std::chrono::duration_cast<std::chrono::seconds>(away).count(),
          problem_ ? ": " + printable(problem_->message()) : "");
      text += line.substr(0, width) + "\n";
      ++lines;
    }
    if (!status_) return text;
    return text + top_frame(*status_, order_, printable(remote_.address()), width, height - lines);
  }

  struct Drawn {
    std::size_t width = 0;
    std::size_t height = 0;
    std::string frame;
    bool operator==(const Drawn&) const = default;
  };

  const Settings& settings_;
  Remote& remote_;
  Interrupts interrupts_;
  std::optional<Screen> screen_;
  Drawn drawn_;
  // The last answer, and when the first question after it was asked.
  std::optional<proto::ClusterStatusResponse> status_;
  std::optional<TimePoint> unanswered_since_;
  // Of the last question.
  std::optional<Error> problem_;
  TopOrder order_ = TopOrder::kRate;
  bool paused_ = false;
  bool anew_ = false;
  bool ended_ = false;
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
  Top shown(settings, *remote);
  for (std::uint32_t frames = 1;; ++frames) {
    TRY(const bool read, shown.show());
    if (!read || frames == args.frames) return kExitOk;
    if (!shown.rest(interval)) return kExitOk;
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
