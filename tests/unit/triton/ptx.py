"""Runs a kernel's PTX on the host: one program at a time, all of its threads in lockstep.

For kernels in Gluon, which Triton can't interpret. It knows what such kernels use: matrix fragments, bulk tensor copies
of boxes [16, 64] of 16-bit elements in 128-byte swizzle, barriers in shared memory that wait for them. Lockstep hides
races between warps; all else is seen: places, masks, phases, expected bytes, alignment, stores that go astray.
Copies come when they are asked for, or (``late``) only when they are waited for.
"""

import re

import numpy as np

U32, U64 = np.uint32, np.uint64
BOX_ROWS, BOX_BYTES = 16, 128


def bits_of(values):
    """float32 -> bfloat16 as uint16, to nearest even."""
    wide = np.asarray(values, np.float32)
    whole = wide.view(U32).astype(U64)
    made = ((whole + 0x7FFF + ((whole >> U64(16)) & U64(1))) >> U64(16)).astype(np.uint16)
    return np.where(np.isnan(wide), np.uint16(0x7FFF), made)


def floats_of(halves):
    """bfloat16 as uint16 -> float32."""
    return (np.asarray(halves).astype(U32) << U32(16)).view(np.float32)


def arguments(text):
    """Split at commas outside brackets."""
    found, depth, begin = [], 0, 0
    for place, letter in enumerate(text + ","):
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            found.append(text[begin:place].strip())
            begin = place + 1
    return [one for one in found if one]


class Program:
    """A kernel's statements: (predicate, operation, arguments), and where its labels are."""

    def __init__(self, text):
        text = text[text.index(".visible .entry") :]
        self.params = re.findall(r"\.param (.*?)(\w+_param_\d+)", text[: text.index("{\n")])
        text = text[text.index("{\n") : text.index("$L__func_end0")]
        lines = (line for line in re.sub(r"//[^\n]*", "", text).split("\n"))
        text = "\n".join(line for line in lines if not line.strip().startswith((".loc", ".file", ".section", ".reg")))
        self.code, self.labels = [], {}
        for statement in text.split(";"):
            self.add(" ".join(statement.split()))

    def add(self, statement):
        while True:
            label = re.match(r"^(\$?[A-Za-z_][\w$]*):(\s|$)", statement)
            if label:
                self.labels[label.group(1)] = len(self.code)
                statement = statement[label.end() :].strip()
            elif re.match(r"^[{}](?!\s*%)", statement):
                statement = statement[1:].strip()
            else:
                break
        if not statement:
            return
        predicate = re.match(r"^@(!?)([%\w]+)\s+", statement)
        if predicate:
            statement = statement[predicate.end() :]
        operation, _, rest = statement.partition(" ")
        self.code.append((predicate and (predicate.group(1) == "!", predicate.group(2)), operation, arguments(rest)))


class Barrier:
    """A barrier in shared memory: phase, arrivals and bytes that are awaited."""

    def __init__(self, count):
        self.phase, self.count, self.awaited, self.bytes = 0, count, count, 0

    def settle(self):
        if not self.awaited and not self.bytes:
            self.phase, self.awaited = self.phase ^ 1, self.count


class Machine:
    """``memory``: the device's, as bytes; ``values``: of parameters, by name; ``boxes``: name of a described parameter
    -> (first byte, rows, columns); ``writable``: ranges of bytes that may be stored to."""

    def __init__(self, program, threads, memory, values, boxes, writable, late):
        self.program, self.threads, self.memory, self.values = program, threads, memory, values
        self.names = {name: number for number, name in enumerate(boxes)}
        self.boxes, self.writable, self.late = list(boxes.values()), writable, late
        self.lane = np.arange(threads) % 32

    def run(self, place, grid):
        """Run the program at ``place`` of ``grid``. ValueError where it does what it must not."""
        self.place, self.grid, self.registers = place, grid, {}
        self.shared = np.full(232448 // 2, 0x7FC0, np.uint16).view(np.uint8).copy()  # NaN
        self.barriers, self.copies, at = {}, [], 0
        while at < len(self.program.code):
            predicate, operation, args = self.program.code[at]
            at += 1
            mask = np.ones(self.threads, bool)
            if predicate:
                mask = self.registers[predicate[1]].astype(bool) ^ predicate[0]
            parts = operation.split(".")
            if parts[0] == "ret":
                break
            if parts[0] == "bra":
                if mask.any() != mask.all():
                    raise ValueError(f"threads part ways at {args}")
                at = self.program.labels[args[0]] if mask.all() else at
            elif mask.any() and parts[0] not in ("bar", "fence", "griddepcontrol"):
                getattr(self, f"do_{parts[0]}", self.calculate)(operation, parts, args, mask)
        if self.copies or self.barriers:
            raise ValueError(f"left behind: {self.copies} {self.barriers}")

    def get(self, name, width=32):
        """A register, a special one or a constant, for each thread."""
        if name in self.registers:
            return self.registers[name]
        kind = {16: np.uint16, 32: U32, 64: U64}[width]
        if name == "%tid.x":
            return np.arange(self.threads, dtype=U32)
        if name.startswith(("%ctaid.", "%nctaid.")):
            value = (self.place if name.startswith("%ctaid") else self.grid)["xyz".index(name[-1])]
        elif name == "global_smem":
            value = 0
        elif name.startswith("0f"):
            value = int(name[2:], 16)
        else:
            value = self.names[name] if name in self.names else int(name.rstrip("U"), 0)
        return np.full(self.threads, value & ((1 << width) - 1), kind)

    def set(self, name, value, mask):
        if name != "_":
            old = self.registers.get(name)
            self.registers[name] = value if old is None or mask.all() else np.where(mask, value, old)

    def floats(self, name):
        return self.get(name).astype(U32, copy=False).view(np.float32)

    def address(self, text):
        name, number = re.match(r"^\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+))?\s*\]$", text).groups()
        return self.get(name, 64).astype(np.int64) + int(number or 0)

    def do_elect(self, operation, parts, args, mask):
        elected, flag = args[0].split("|")
        self.set(elected, np.zeros(self.threads, U32), mask)
        self.set(flag, self.lane == 0, mask)

    def do_mbarrier(self, operation, parts, args, mask):
        if parts[1] == "init":
            self.barriers[self.address(args[0])[mask][0]] = Barrier(int(args[1]))
        elif parts[1] == "inval":
            del self.barriers[self.address(args[0])[mask][0]]
        elif parts[1] == "arrive":
            for place in self.address(args[1])[mask]:
                barrier = self.barriers[place]
                barrier.bytes, barrier.awaited = barrier.bytes + int(args[2]), barrier.awaited - 1
                barrier.settle()
        else:  # try_wait
            place = self.address(args[1])[0]
            due = [copy for copy in self.copies if copy[-1] == place]
            self.copies = [copy for copy in self.copies if copy[-1] != place]
            for copy in due:
                self.copy(*copy)
            if self.barriers[place].phase == self.get(args[2])[0]:
                raise ValueError(f"waits for ever at {place}")
            self.set(args[0], np.ones(self.threads, bool), mask)

    def do_cp(self, operation, parts, args, mask):
        box, column, row = re.match(r"^\[\s*([%\w]+),\s*\{\s*([%\w]+),\s*([%\w]+)\s*\}\s*\]$", args[1]).groups()
        column, row = (self.get(name).view(np.int32) for name in (column, row))
        goal, box, ready = self.address(args[0]), self.get(box, 64), self.address(args[2])
        for thread in np.nonzero(mask)[0]:
            copy = [int(each[thread]) for each in (goal, box, column, row, ready)]
            if self.late:
                self.copies.append(copy)
            else:
                self.copy(*copy)

    def copy(self, goal, box, column, first, ready):
        base, rows, columns = self.boxes[box]
        for number in range(BOX_ROWS):
            row, source = first + number, np.zeros(BOX_BYTES, np.uint8)
            if 0 <= row < rows and 0 <= column < columns:
                source = self.memory[base + (row * columns + column) * 2 :][:BOX_BYTES]
            place = goal + number * BOX_BYTES + np.arange(BOX_BYTES)
            self.shared[place ^ (((place >> 7) & 7) << 4)] = source
        self.barriers[ready].bytes -= BOX_ROWS * BOX_BYTES
        self.barriers[ready].settle()

    def do_ldmatrix(self, operation, parts, args, mask):
        goals, places, lane = arguments(args[0][1:-1]), self.address(args[1]).reshape(-1, 4, 8), np.arange(32)
        for number, goal in enumerate(goals):
            rows = self.shared[places[:, number, :, None] + np.arange(16)].view(np.uint16)  # [warps, 8, 8]
            if "trans" in parts:
                low, high = rows[:, 2 * (lane % 4), lane // 4], rows[:, 2 * (lane % 4) + 1, lane // 4]
            else:
                low, high = rows[:, lane // 4, 2 * (lane % 4)], rows[:, lane // 4, 2 * (lane % 4) + 1]
            self.set(goal, (low.astype(U32) | (high.astype(U32) << U32(16))).reshape(-1), mask)

    def do_stmatrix(self, operation, parts, args, mask):
        names, lane = arguments(args[1][1:-1]), np.arange(32)
        places = self.address(args[0]).reshape(-1, 32)[:, : 8 * len(names)].reshape(-1, len(names), 8)
        for number, name in enumerate(names):
            pairs = self.get(name).view(np.uint16).reshape(-1, 32, 2)
            for each in range(2):
                row, column = lane // 4, 2 * (lane % 4) + each
                row, column = (column, row) if "trans" in parts else (row, column)
                at = places[:, number, row] + 2 * column
                self.shared[at[..., None] + np.arange(2)] = pairs[..., each, None].view(np.uint8)

    def do_mma(self, operation, parts, args, mask):
        goals, left, right, sums = (arguments(arg[1:-1]) for arg in args)
        group, inner, warps = np.arange(32) // 4, np.arange(32) % 4, self.threads // 32
        a, b, c = (np.zeros((warps, *shape), np.float32) for shape in ((16, 16), (16, 8), (16, 8)))
        for name, row, column in zip(left, (0, 8, 0, 8), (0, 0, 8, 8), strict=True):
            pair = floats_of(self.get(name).view(np.uint16)).reshape(warps, 32, 2)
            a[:, group + row, 2 * inner + column] = pair[..., 0]
            a[:, group + row, 2 * inner + 1 + column] = pair[..., 1]
        for name, row in zip(right, (0, 8), strict=True):
            pair = floats_of(self.get(name).view(np.uint16)).reshape(warps, 32, 2)
            b[:, 2 * inner + row, group], b[:, 2 * inner + 1 + row, group] = pair[..., 0], pair[..., 1]
        corners = ((0, 0), (0, 1), (8, 0), (8, 1))
        for name, (row, column) in zip(sums, corners, strict=True):
            c[:, group + row, 2 * inner + column] = self.floats(name).reshape(warps, 32)
        c = (a.astype(np.float64) @ b.astype(np.float64) + c).astype(np.float32)
        for name, (row, column) in zip(goals, corners, strict=True):
            self.set(name, c[:, group + row, 2 * inner + column].reshape(-1).view(U32), mask)

    def do_ld(self, operation, parts, args, mask):
        width = int(parts[-1][1:])
        if parts[1] == "param":
            value = self.values[args[1].strip("[] ")]
            wide = width == 64 or args[0].startswith("%rd")  # a signed number may be widened on the way
            self.set(args[0], np.full(self.threads, value, U64 if wide else U32), mask)
            return
        goals, threads = arguments(args[0].strip("{} ")), np.nonzero(mask)[0]
        places = self.places(parts[1], args[1], threads, width // 8 * len(goals))
        source = self.memory if parts[1] == "global" else self.shared
        kind = {16: np.uint16, 32: U32, 64: U64}[width]
        found = source[places].view(kind)
        for number, goal in enumerate(goals):
            value = np.zeros(self.threads, kind)
            value[threads] = found[:, number]
            self.set(goal, value, mask)

    def do_st(self, operation, parts, args, mask):
        width, names, threads = int(parts[-1][1:]), arguments(args[1].strip("{} ")), np.nonzero(mask)[0]
        kind = {16: np.uint16, 32: U32, 64: U64}[width]
        places = self.places(parts[1], args[0], threads, width // 8 * len(names))
        if parts[1] == "global":
            for place in places[:, 0]:
                if not any(begin <= place < end for begin, end in self.writable):
                    raise ValueError(f"a store goes astray: {place}")
        data = np.stack([self.get(name, width).astype(kind)[threads] for name in names], 1)
        (self.memory if parts[1] == "global" else self.shared)[places] = data.view(np.uint8)

    def places(self, space, text, threads, size):
        """[threads, size] places of bytes."""
        first = self.address(text)[threads]
        end = len(self.memory if space == "global" else self.shared)
        if (first % size).any() or (first < 0).any() or (first + size > end).any():
            raise ValueError(f"{text}: {first} in {space} memory")
        return first[:, None] + np.arange(size)

    def do_atom(self, operation, parts, args, mask):
        places, added, old = self.address(args[1]), self.get(args[2]), np.zeros(self.threads, U32)
        for thread in np.nonzero(mask)[0]:
            here = self.memory[places[thread] :][:4].view(U32)
            old[thread] = here[0]
            here[0] += added[thread]
        self.set(args[0], old, mask)

    def do_mov(self, operation, parts, args, mask):
        width = {"pred": 32}.get(parts[-1]) or int(parts[-1][1:])
        if args[0].startswith("{"):
            low, high = arguments(args[0][1:-1])
            value = self.get(args[1])
            self.set(low, (value & U32(0xFFFF)).astype(np.uint16), mask)
            self.set(high, (value >> U32(16)).astype(np.uint16), mask)
        elif args[1].startswith("{"):
            low, high = (self.get(name, 16).astype(U32) for name in arguments(args[1][1:-1]))
            self.set(args[0], low | (high << U32(16)), mask)
        else:
            value = self.get(args[1], width)
            self.set(args[0], value.astype(U64) if width == 64 else value, mask)

    def do_shfl(self, operation, parts, args, mask):
        number, thread = int(self.get(args[2])[0]), np.arange(self.threads)
        source = thread ^ number if parts[2] == "bfly" else thread // 32 * 32 + number
        self.set(args[0].split("|")[0], self.get(args[1])[source], mask)

    def do_cvta(self, operation, parts, args, mask):
        self.set(args[0], self.get(args[1], 64), mask)

    def do_cvt(self, operation, parts, args, mask):
        if operation == "cvt.rn.bf16x2.f32":
            high, low = (bits_of(self.floats(name)).astype(U32) for name in args[1:])
            value = (high << U32(16)) | low
        else:
            value = {
                "cvt.rn.bf16.f32": lambda: bits_of(self.floats(args[1])),
                "cvt.f32.bf16": lambda: floats_of(self.get(args[1], 16)).view(U32),
                "cvt.rn.f32.s32": lambda: self.get(args[1]).view(np.int32).astype(np.float32).view(U32),
                "cvt.s64.s32": lambda: self.get(args[1]).view(np.int32).astype(np.int64).view(U64),
                "cvt.u64.u32": lambda: self.get(args[1]).astype(U64),
                "cvt.u32.u16": lambda: self.get(args[1], 16).astype(U32),
                "cvt.u16.u32": lambda: self.get(args[1]).astype(np.uint16),
                "cvt.u32.u64": lambda: self.get(args[1], 64).astype(U32),
            }[operation]()
        self.set(args[0], value, mask)

    def do_setp(self, operation, parts, args, mask):
        a, b = self.operands(parts[-1], args[1:])
        compare = {"lt": a < b, "gt": a > b, "eq": a == b, "ne": a != b, "ge": a >= b, "le": a <= b,
                   "neu": a != b, "leu": ~(a > b), "gtu": ~(a <= b), "ltu": ~(a >= b), "geu": ~(a < b),
                   "nan": (a != a) | (b != b), "num": (a == a) & (b == b), "equ": ~((a < b) | (a > b))}  # fmt: skip
        self.set(args[0], compare[parts[1]], mask)

    def do_selp(self, operation, parts, args, mask):
        width = int(parts[-1][1:])
        chosen = self.get(args[3]).astype(bool)
        self.set(args[0], np.where(chosen, self.get(args[1], width), self.get(args[2], width)), mask)

    def operands(self, kind, names):
        if kind == "pred":
            return [self.get(name).astype(bool) for name in names]
        if kind == "f32":
            return [self.floats(name) for name in names]
        width = int(kind[1:])
        found = [self.get(name, width) for name in names]
        return [each.view(f"i{width // 8}") for each in found] if kind[0] == "s" else found

    def calculate(self, operation, parts, args, mask):
        kind, name = parts[-1], parts[0]
        if name in ("mul", "mad") and parts[1] == "wide":
            a, b = (each.astype(np.int64) for each in self.operands(kind, args[1:3]))
            value = a * b + (self.get(args[3], 64).view(np.int64) if name == "mad" else 0)
            return self.set(args[0], value.view(U64), mask)
        if name in ("max", "min") and "NaN" in parts:
            value = {"max": np.maximum, "min": np.minimum}[name](*self.operands(kind, args[1:]))
        elif name in ("shl", "shr"):
            (a,), count = self.operands(kind, args[1:2]), self.get(args[2])
            value = a << count.astype(a.dtype) if name == "shl" else a >> count.astype(a.dtype)
        elif name == "bfe":
            first, count = (int(self.get(each)[0]) for each in args[2:4])
            left = 32 - first - count
            (a,) = self.operands(kind, args[1:2])
            value = (a << a.dtype.type(left)) >> a.dtype.type(left + first)
        else:
            with np.errstate(all="ignore"):
                value = OPERATIONS[name](*self.operands(kind, args[1:]))
        if value.dtype != bool:
            value = value.astype(np.float32).view(U32) if kind == "f32" else value.view(f"u{value.dtype.itemsize}")
        return self.set(args[0], value, mask)


OPERATIONS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "mad": lambda a, b, c: a * b + c,
    "fma": lambda a, b, c: a.astype(np.float64) * b + c,
    "div": lambda a, b: a / b if a.dtype == np.float32 else np.trunc(a / b).astype(a.dtype),
    "max": lambda a, b: np.fmax(a, b),
    "min": lambda a, b: np.fmin(a, b),
    "neg": lambda a: -a,
    "not": lambda a: ~a,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "ex2": np.exp2,
    "lg2": np.log2,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "rcp": lambda a: 1 / a,
}
