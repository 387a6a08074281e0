#include "recovery/device/process/device_loans.h"

#include <utility>

namespace rekindle::device {

class DeviceLoans::Lent final : public bucket::Loan {
 public:
  Lent(DeviceLoans& loans, bucket::Device& device) : loans_(loans), device_(device) {}
  ~Lent() override {
    const std::lock_guard lock(loans_.mutex_);
    state().wanted = nullptr;
  }
  bucket::Device& device() const override { return device_; }
  bool wanted_back() const override {
    const std::lock_guard lock(loans_.mutex_);
    return state().uses > 0;
  }
  void condemn() override {
    const std::lock_guard lock(loans_.mutex_);
    state().condemned = true;
  }

 private:
  State& state() const { return loans_.states_.at(device_.id()); }

  DeviceLoans& loans_;
  bucket::Device& device_;
};

std::unique_ptr<DeviceLoans::Use> DeviceLoans::use(const std::string& id) {
  const std::lock_guard lock(mutex_);
  State& state = states_[id];
  ++state.uses;
  if (state.wanted) state.wanted();
  return std::make_unique<Use>(*this, id);
}

void DeviceLoans::end_use(const std::string& id) {
  const std::lock_guard lock(mutex_);
  --states_.at(id).uses;
}

DeviceLoans::Loans DeviceLoans::borrow(const std::string& borrower,
                                       const std::function<void()>& wanted) {
  Loans loans;
  if (most_ == 0) return loans;
  const auto opened = devices_.opened();
  loans.reserve(opened.size());
  for (bucket::Device* const device : opened) {
    if (device->id() == borrower) continue;
    const std::lock_guard lock(mutex_);
    State& state = states_[device->id()];
    if (state.uses > 0 || state.condemned || state.wanted) continue;
    auto lent = std::make_unique<Lent>(*this, *device);
    state.wanted = wanted;
    loans.push_back(std::move(lent));
  }
  return loans;
}

}  // namespace rekindle::device
