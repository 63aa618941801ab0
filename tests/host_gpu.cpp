// A CUDA device without a GPU: its memory is the host's, and its kernels are those of the CPU, given to PyTorch under the
// dispatch key CUDA. What a GPU refuses it refuses, and what makes a host wait for a GPU it counts (tests/host_gpu.py).
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/set_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <unordered_set>

namespace {
using at::Tensor;
using namespace c10;

constexpr int NUM_DEVICES = 8;
thread_local DeviceIndex current = 0;

// Makes a device current for its lifetime.
struct Within {
  DeviceIndex before = current;
  explicit Within(std::optional<Device> device) {
    if (device && device->has_index()) current = device->index();
  }
  ~Within() { current = before; }
};

// Work of streams. A kernel runs when it is called, but a copy to the host is there only once the host has waited for it;
// and whoever uses what another stream may not have finished is told of.

using Work = std::map<int, uint64_t>;  // stream -> how many of its operations: an event, or what a stream comes after

struct Pending {
  int stream;
  uint64_t number;
  Tensor host, values;  // a copy from the host if `reads`, whose memory must keep these values; else to it
  bool reads;
};

thread_local const char* lost = nullptr;  // told of with the next operation: who frees may hold Python's lock
std::mutex lock;  // of all below, and of every Block
std::map<int, Work> done_before;
std::vector<Pending> pending;
int num_streams = 0;
thread_local StreamId stream_ids[NUM_DEVICES] = {};

void (*on_wait)(const char*, int) = nullptr;  // what, and how many operations of its stream the host runs ahead of it
void (*on_race)(const char*) = nullptr;

int key_of(Stream stream) { return stream.device_index() + NUM_DEVICES * int(stream.id()); }
int stream_of(DeviceIndex device) { return device + NUM_DEVICES * int(stream_ids[device]); }

void merge(Work& into, const Work& other) {
  for (auto [stream, number] : other) into[stream] = std::max(into[stream], number);
}

bool is_after(const Work& work, int stream, uint64_t number) {
  auto found = work.find(stream);
  return found != work.end() && found->second >= number;
}

struct Point {  // an event
  int stream;
  Work work;
};

struct Block {
  void* data;
  size_t size;
  DeviceIndex device;
  int home;  // the stream that it is taken on, and that may use it anew once it is freed
  int writer = -1;
  uint64_t written = 0;
  Work read = {};
  std::set<int> recorded = {};
};

void release(void* context);

Block* block_of(const Tensor& tensor) {
  if (!tensor.has_storage()) return nullptr;
  const auto& pointer = tensor.storage().data_ptr();
  return pointer.get_deleter() == &release ? static_cast<Block*>(pointer.get_context()) : nullptr;
}

void tell(const char* race) {
  if (race && on_race) on_race(race);
}

// Notes an operation of the current stream.
void submit(DeviceIndex device, const std::vector<std::pair<Tensor, bool>>& used) {
  const char* race = std::exchange(lost, nullptr);
  {
    std::lock_guard<std::mutex> guard(lock);
    const int stream = stream_of(device);
    Work& known = done_before[stream];
    const uint64_t number = ++known[stream];
    for (auto& [tensor, written] : used) {
      Block* block = block_of(tensor);
      if (!block) continue;
      if (block->writer >= 0 && !is_after(known, block->writer, block->written)) race = "reads what another stream writes";
      if (written) {
        for (auto [other, last] : block->read)
          if (!is_after(known, other, last)) race = "writes what another stream reads";
        block->writer = stream, block->written = number;
        block->read.clear();
      } else {
        block->read[stream] = number;
      }
    }
  }
  tell(race);
}

// Ends pending copies: all that this work has in it, or those of one piece of host memory.
void finish(const Work& work, const void* memory = nullptr) {
  std::vector<Pending> ready;  // outlives the lock: to let a tensor go may need Python's
  const char* race = nullptr;
  {
    std::lock_guard<std::mutex> guard(lock);
    for (auto each = pending.begin(); each != pending.end();) {
      if ((memory && memory != each->host.storage().data()) || !is_after(work, each->stream, each->number)) {
        ++each;
        continue;
      }
      void* const host = each->host.data_ptr();
      const void* const values = each->values.data_ptr();
      const size_t size = each->values.nbytes();
      if (!each->reads) {
        std::memcpy(host, values, size);
      } else if (std::memcmp(host, values, size)) {
        race = "the host changed memory that was being copied";
      }
      ready.push_back(std::move(*each));
      each = pending.erase(each);
    }
  }
  tell(race);
}

// The host has come to the end of this work.
void finished(const Work& work) {
  {
    std::lock_guard<std::mutex> guard(lock);
    for (auto& [stream, known] : done_before) merge(known, work);
  }
  finish(work);
}

Work work_of(int stream) {
  std::lock_guard<std::mutex> guard(lock);
  return done_before[stream];
}

// The host waits for a stream.
void wait(const char* what, DeviceIndex device) {
  if (on_wait) on_wait(what, 0);
  finished(work_of(stream_of(device)));
}

// Memory. New memory is full of NaN, as that of a GPU is full of what was there before.

struct Memory {
  std::atomic<size_t> now{0}, most{0}, limit{0};
} memories[NUM_DEVICES];

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    std::lock_guard<std::mutex> guard(lock);
    Work used = block->read;
    if (block->writer >= 0) used[block->writer] = std::max(used[block->writer], block->written);
    for (auto [stream, number] : used)
      if (stream != block->home && !block->recorded.count(stream) && !is_after(done_before[block->home], stream, number))
        lost = "memory is free for its stream while another one uses it";
  }
  memories[block->device].now -= block->size;
  std::free(block->data);
  delete block;
}

struct DeviceAllocator final : Allocator {
  DataPtr allocate(size_t size) override {
    const DeviceIndex index = current;
    Memory& memory = memories[index];
    const size_t limit = memory.limit;
    TORCH_CHECK_WITH(
        OutOfMemoryError, !limit || memory.now + size <= limit, "CUDA out of memory. Tried to allocate ", size,
        " bytes. GPU ", int(index), " has a total capacity of ", limit, " bytes of which ", limit - memory.now,
        " is free.");
    auto* block = new Block{size ? std::aligned_alloc(64, (size + 63) / 64 * 64) : nullptr, size, index, stream_of(index)};
    if (size) std::memset(block->data, 0xff, size);
    const size_t now = memory.now += size;
    size_t most = memory.most;
    while (most < now && !memory.most.compare_exchange_weak(most, now)) {}
    return {block->data, block, &release, Device(DeviceType::CUDA, index)};
  }
  void copy_data(void* target, const void* source, size_t size) const override { std::memcpy(target, source, size); }
} device_allocator;

std::mutex pinned_lock;
std::map<const char*, size_t> pinned;

void release_pinned(void* data) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  pinned.erase(static_cast<const char*>(data));
  std::free(data);
}

bool is_pinned_pointer(const void* data) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  auto found = pinned.upper_bound(static_cast<const char*>(data));
  if (found == pinned.begin()) return false;
  --found;
  return static_cast<const char*>(data) < found->first + found->second;
}

struct PinnedAllocator final : Allocator {
  DataPtr allocate(size_t size) override {
    if (!size) return {nullptr, Device(DeviceType::CPU)};
    void* data = std::aligned_alloc(64, (size + 63) / 64 * 64);
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned[static_cast<const char*>(data)] = size;
    return {data, data, &release_pinned, Device(DeviceType::CPU)};
  }
  void copy_data(void* target, const void* source, size_t size) const override { std::memcpy(target, source, size); }
} pinned_allocator;

// What makes the host wait, as `torch.cuda.set_sync_debug_mode` tells of it on a GPU.

const std::unordered_set<std::string> WAITING = {
    "aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave", "aten::bincount", "aten::_assert_async_",
    "aten::allclose", "aten::is_nonzero", "aten::histc"};
const std::unordered_set<std::string> INDEXING = {
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put", "aten::_unsafe_index",
    "aten::_unsafe_index_put"};

// Kernels.

Tensor with_storage(const Storage& storage, DispatchKey key, const Tensor& like, caffe2::TypeMeta dtype) {
  auto tensor = at::detail::make_tensor<TensorImpl>(Storage(storage), DispatchKeySet(key), dtype);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) tensor._set_conj(true);
  if (like.is_neg()) tensor._set_neg(true);
  return tensor;
}

// A CPU tensor in the same memory.
Tensor on_host(const Tensor& tensor) {
  const auto& own = tensor.storage();
  Storage storage(
      Storage::use_byte_size_t(), own.nbytes(),
      DataPtr(const_cast<void*>(own.data()), Device(DeviceType::CPU)), nullptr, false);
  return with_storage(storage, DispatchKey::CPU, tensor, tensor.dtype());
}

Tensor empty_strided(
    IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
    std::optional<Device> device, std::optional<bool>) {
  const Within within(device);
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator, DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype));
}

Tensor empty(
    IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device,
    std::optional<bool>, std::optional<MemoryFormat> format) {
  const Within within(device);
  return at::detail::empty_generic(
      size, &device_allocator, DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype), format);
}

Tensor on_device(const Tensor& tensor, Device device) {
  auto moved =
      empty_strided(tensor.sizes(), tensor.strides(), tensor.scalar_type(), std::nullopt, device, std::nullopt);
  on_host(moved).copy_(tensor);
  return moved;
}

const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  int64_t needed = impl->storage_offset();
  int64_t num = 1;
  for (auto each : size) num *= each;
  const size_t bytes = (needed + num) * self.itemsize();
  if (num && bytes > self.storage().nbytes()) {
    const Within within(self.device());
    auto data = device_allocator.allocate(bytes);
    if (self.storage().nbytes()) std::memcpy(data.get(), self.storage().data(), self.storage().nbytes());
    impl->unsafe_storage().set_data_ptr_noswap(std::move(data));
    impl->unsafe_storage().set_nbytes(bytes);
  }
  impl->set_sizes_contiguous(size);
  return self;
}

Tensor& set_storage(Tensor& self, Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.data() && stride.size() == size.size()) {
    impl->set_sizes_and_strides(size, stride, offset);
  } else {
    impl->set_sizes_contiguous(size);
    impl->set_storage_offset(offset);
  }
  return self;
}

Tensor& set_whole_storage(Tensor& self, Storage source) {
  const int64_t size = source.nbytes() / self.itemsize();
  return set_storage(self, std::move(source), 0, {size}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor snapshot(const Tensor& host) {
  const Tensor copy = at::detail::empty_strided_generic(
      host.sizes(), host.strides(), GetAllocator(DeviceType::CPU), DispatchKeySet(DispatchKey::CPU),
      host.scalar_type());
  copy.copy_(host);
  return copy;
}

// Whether one block of bytes is moved, so that PyTorch needs no memory in between.
bool is_one_block(const Tensor& to, const Tensor& from) {
  return to.scalar_type() == from.scalar_type() && to.sizes() == from.sizes() && to.is_non_overlapping_and_dense() &&
      to.strides() == from.strides();
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  const bool from = source.is_cuda(), to = self.is_cuda();
  const auto device = (to ? self : source).device().index();
  const Tensor& host = from ? self : source;
  const bool is_pinned = host.numel() && is_pinned_pointer(host.storage().data()) && is_one_block(self, source);
  submit(device, {{source, false}, {self, true}});
  if (from != to && host.numel() && (!non_blocking || (from && !is_pinned)))
    wait(from ? "a copy to the host" : "a copy from the host", device);
  else if (from != to && is_pinned) {
    finish(work_of(stream_of(device)), host.storage().data());
    // Made before the lock is taken: to count a tensor once more may need Python's.
    Pending copy{stream_of(device), 0, host, snapshot(from ? on_host(source) : source), to};
    if (from) std::memset(self.data_ptr(), 0xff, self.nbytes());
    {
      std::lock_guard<std::mutex> guard(lock);
      copy.number = done_before[copy.stream][copy.stream];
      pending.push_back(std::move(copy));
    }
    if (from) return self;
  }
  Tensor target = to ? on_host(self) : self;
  target.copy_(from ? on_host(source) : source);
  return self;
}

void record_stream(Tensor& self, Stream stream) {
  std::lock_guard<std::mutex> guard(lock);
  if (Block* block = block_of(self)) block->recorded.insert(key_of(stream));
}

int64_t attention_choice(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>,
    bool) {
  return 0;  // by matrix products: neither the CPU nor this device has the kernels of a GPU
}

const at::Generator& generator(int64_t device) {
  static std::vector<at::Generator> all;
  if (all.empty())
    for (int i = 0; i < NUM_DEVICES; ++i) all.push_back(at::detail::createCPUGenerator(i));
  return all[device];
}

void fallback(const OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t num = schema.arguments().size(), begin = stack->size() - num;
  const std::string& name = schema.name();
  const bool indexes = INDEXING.count(name);
  const char* waiting = WAITING.count(name) ? name.c_str() : nullptr;
  std::vector<std::pair<Tensor, bool>> used;
  std::optional<Device> device;
  const Tensor* stray = nullptr;
  std::vector<std::pair<Tensor, Tensor>> pairs;  // (on the device, alias on the host)
  std::vector<std::pair<Tensor, Tensor>> grown;  // outputs that are sized by the kernel
  const auto visit = [&](const Tensor& tensor, bool written, bool index) -> Tensor {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      if (index) {
        waiting = "indices on the host";
      } else if (tensor.dim() || written) {
        stray = &tensor;
      }
      return tensor;
    }
    if (index && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte)) waiting = "a boolean index";
    if (device && *device != tensor.device())
      TORCH_CHECK(
          false, name, ": expected all tensors to be on the same device, but found at least two devices, ", *device,
          " and ", tensor.device());
    device = tensor.device();
    used.emplace_back(tensor, written);
    if (written && !tensor.numel()) {
      grown.emplace_back(tensor, at::detail::empty_generic(
          {0}, GetAllocator(DeviceType::CPU), DispatchKeySet(DispatchKey::CPU), tensor.scalar_type(), std::nullopt));
      return grown.back().second;
    }
    pairs.emplace_back(tensor, on_host(tensor));
    return pairs.back().second;
  };
  for (size_t i = 0; i < num; ++i) {
    auto& value = (*stack)[begin + i];
    const auto* alias = schema.arguments()[i].alias_info();
    const bool written = alias && alias->isWrite();
    if (value.isTensor()) {
      value = visit(value.toTensor(), written, false);
    } else if (value.isTensorList()) {
      std::vector<Tensor> tensors = value.toTensorVector();
      for (auto& each : tensors) each = visit(each, written, indexes);
      value = IValue(List<Tensor>(at::ArrayRef<Tensor>(tensors)));
    } else if (value.isOptionalTensorList()) {
      List<std::optional<Tensor>> tensors;
      for (const std::optional<Tensor> each : value.toOptionalTensorList())
        tensors.push_back(each ? std::optional<Tensor>(visit(*each, written, indexes)) : std::nullopt);
      value = IValue(std::move(tensors));
    } else if (value.isNone() && schema.arguments()[i].name() == "generator") {
      value = IValue(generator(device ? device->index() : current));
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      device = value.toDevice();
      value = IValue(Device(DeviceType::CPU));
    }
  }
  if (!device) device = Device(DeviceType::CUDA, current);
  if (!device->has_index()) device = Device(DeviceType::CUDA, current);
  TORCH_CHECK(
      !stray, name, ": expected all tensors to be on the same device, but found at least two devices, ", *device,
      " and cpu");

  submit(device->index(), used);
  if (waiting) wait(waiting, device->index());
  op.callBoxed(stack);

  for (auto& [own, host] : grown)
    if (host.numel()) {
      resize_(own, host.sizes(), std::nullopt);
      on_host(own).copy_(host);
    } else {
      own.unsafeGetTensorImpl()->set_sizes_contiguous(host.sizes());
    }
  std::vector<std::pair<Tensor, bool>> submitted;
  const auto back = [&](const Tensor& tensor) -> Tensor {
    if (!tensor.defined() || tensor.is_cuda()) return tensor;
    for (auto* known : {&pairs, &grown})
      for (auto& [own, host] : *known) {
        if (host.unsafeGetTensorImpl() == tensor.unsafeGetTensorImpl()) return own;
        if (known == &pairs && host.storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl())
          return with_storage(own.storage(), DispatchKey::CUDA, tensor, tensor.dtype());
      }
    Tensor made = on_device(tensor, *device);
    submitted.emplace_back(made, true);
    return made;
  };
  const size_t results = schema.returns().size(), first = stack->size() - results;
  for (size_t i = 0; i < results; ++i) {
    auto& value = (*stack)[first + i];
    if (value.isTensor()) {
      value = back(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> tensors = value.toTensorVector();
      for (auto& each : tensors) each = back(each);
      value = IValue(List<Tensor>(at::ArrayRef<Tensor>(tensors)));
    }
  }
  if (!submitted.empty()) submit(device->index(), submitted);
}

// What PyTorch asks of an accelerator.

struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device d) const override {
    return Device(DeviceType::CUDA, std::exchange(current, d.index()));
  }
  Device getDevice() const override { return Device(DeviceType::CUDA, current); }
  void setDevice(Device d) const override { current = d.index(); }
  void uncheckedSetDevice(Device d) const noexcept override { current = d.index(); }
  Stream getStream(Device d) const noexcept override {
    const auto index = d.has_index() ? d.index() : current;
    return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, index), stream_ids[index]);
  }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::DEFAULT, d); }
  Stream getNewStream(Device d, int) const override {
    std::lock_guard<std::mutex> guard(lock);
    return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, d.has_index() ? d.index() : current), ++num_streams);
  }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream s) const noexcept override {
    const auto before = getStream(s.device());
    stream_ids[s.device_index()] = s.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return NUM_DEVICES; }
  void record(void** event, const Stream& stream, DeviceIndex, EventFlag) const override {
    delete static_cast<Point*>(*event);
    *event = new Point{key_of(stream), work_of(key_of(stream))};
  }
  void block(void* event, const Stream& stream) const override {
    std::lock_guard<std::mutex> guard(lock);
    if (event) merge(done_before[key_of(stream)], static_cast<Point*>(event)->work);
  }
  bool queryEvent(void* event) const override {
    if (event) finished(static_cast<Point*>(event)->work);
    return true;
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Point*>(event); }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    auto [stream, work] = *static_cast<Point*>(event);
    if (on_wait) on_wait("an event", int(work_of(stream)[stream] - work[stream]));
    finished(work);
  }
  void synchronizeStream(const Stream& stream) const override {
    if (on_wait) on_wait("a stream", 0);
    finished(work_of(key_of(stream)));
  }
  void synchronizeDevice(const DeviceIndex index) const override {
    if (on_wait) on_wait("the device", 0);
    Work all;
    {
      std::lock_guard<std::mutex> guard(lock);
      for (auto& [stream, known] : done_before)
        if (stream % NUM_DEVICES == index) merge(all, known);
    }
    finished(all);
  }
  bool queryStream(const Stream&) const override { return true; }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.0; }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex deviceCount() const override { return NUM_DEVICES; }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return generator(index < 0 ? current : index);
  }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned_pointer(data); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
};

Guard guard;

TORCH_LIBRARY(host_gpu, m) { m.def("generator(int device) -> Generator?", [](int64_t i) { return generator(i); }); }
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("copy_", copy_);
  m.impl("record_stream", record_stream);
}
}  // namespace

namespace at {
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", ::Hooks)
}

extern "C" {
void register_device() {
  impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
  SetAllocator(DeviceType::CUDA, &device_allocator);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention_choice);
}
void set_callbacks(void (*wait)(const char*, int), void (*race)(const char*)) { on_wait = wait, on_race = race; }
int get_device() { return current; }
void set_device(int index) { current = index; }
size_t bytes_now(int index) { return memories[index].now; }
size_t bytes_most(int index) { return memories[index].most; }
void reset_most(int index) { memories[index].most = memories[index].now.load(); }
void set_limit(int index, size_t bytes) { memories[index].limit = bytes; }
}
