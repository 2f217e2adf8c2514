"""Textbook Python functions: the code that people type first to test completion."""

import random
from textwrap import dedent

from .dialogue import Dialogue, exchange, wording

_SOURCES = '''
computes the nth Fibonacci number
def fibonacci(n):
    """Return the nth Fibonacci number."""
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a
---
computes the nth Fibonacci number with recursion
def fib(n):
    if n < 2:
        return n
    return fib(n - 1) + fib(n - 2)
---
computes the factorial of a number
def factorial(n):
    """Return n! for n >= 0."""
    result = 1
    for i in range(2, n + 1):
        result *= i
    return result
---
checks whether a number is prime
def is_prime(n):
    """Return True if n is a prime number."""
    if n < 2:
        return False
    for i in range(2, int(n ** 0.5) + 1):
        if n % i == 0:
            return False
    return True
---
finds all primes below a limit
def primes(limit):
    """Return the primes below limit (sieve of Eratosthenes)."""
    sieve = [True] * limit
    result = []
    for i in range(2, limit):
        if sieve[i]:
            result.append(i)
            for j in range(i * i, limit, i):
                sieve[j] = False
    return result
---
computes the greatest common divisor
def gcd(a, b):
    """Return the greatest common divisor of a and b."""
    while b:
        a, b = b, a % b
    return a
---
computes the least common multiple
def lcm(a, b):
    """Return the least common multiple of a and b."""
    return a * b // gcd(a, b)
---
reverses a string
def reverse_string(text):
    """Return text backwards."""
    return text[::-1]
---
checks whether a string is a palindrome
def is_palindrome(text):
    """Return True if text reads the same backwards."""
    return text == text[::-1]
---
sums a list
def sum_list(numbers):
    """Return the sum of the numbers."""
    total = 0
    for number in numbers:
        total += number
    return total
---
adds two numbers
def add(a, b):
    """Return the sum of a and b."""
    return a + b
---
multiplies two numbers
def multiply(a, b):
    """Return the product of a and b."""
    return a * b
---
computes the average of a list
def average(numbers):
    """Return the mean of the numbers."""
    return sum(numbers) / len(numbers)
---
finds the largest number in a list
def find_max(numbers):
    """Return the largest of the numbers."""
    largest = numbers[0]
    for number in numbers:
        if number > largest:
            largest = number
    return largest
---
finds the smallest number in a list
def find_min(numbers):
    """Return the smallest of the numbers."""
    smallest = numbers[0]
    for number in numbers:
        if number < smallest:
            smallest = number
    return smallest
---
does a binary search
def binary_search(items, target):
    """Return the index of target in the sorted items, or -1."""
    low, high = 0, len(items) - 1
    while low <= high:
        middle = (low + high) // 2
        if items[middle] == target:
            return middle
        if items[middle] < target:
            low = middle + 1
        else:
            high = middle - 1
    return -1
---
sorts a list with bubble sort
def bubble_sort(items):
    """Sort items in place."""
    n = len(items)
    for i in range(n):
        for j in range(n - i - 1):
            if items[j] > items[j + 1]:
                items[j], items[j + 1] = items[j + 1], items[j]
    return items
---
sorts a list with quicksort
def quicksort(items):
    """Return the items in ascending order."""
    if len(items) <= 1:
        return items
    pivot = items[0]
    smaller = [x for x in items[1:] if x < pivot]
    larger = [x for x in items[1:] if x >= pivot]
    return quicksort(smaller) + [pivot] + quicksort(larger)
---
sorts a list with merge sort
def merge_sort(items):
    """Return the items in ascending order."""
    if len(items) <= 1:
        return items
    middle = len(items) // 2
    left = merge_sort(items[:middle])
    right = merge_sort(items[middle:])
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i])
            i += 1
        else:
            result.append(right[j])
            j += 1
    return result + left[i:] + right[j:]
---
counts the words in a text
def count_words(text):
    """Return how many words text has."""
    return len(text.split())
---
counts how often each word occurs
def word_frequencies(text):
    """Return a dictionary from word to count."""
    counts = {}
    for word in text.split():
        counts[word] = counts.get(word, 0) + 1
    return counts
---
counts the vowels in a string
def count_vowels(text):
    """Return how many vowels text has."""
    return sum(1 for char in text.lower() if char in "aeiou")
---
flattens a list of lists
def flatten(lists):
    """Return the items of all lists in one list."""
    return [item for sublist in lists for item in sublist]
---
removes duplicates from a list
def unique(items):
    """Return the items without duplicates, in order."""
    seen = set()
    result = []
    for item in items:
        if item not in seen:
            seen.add(item)
            result.append(item)
    return result
---
checks whether a number is even
def is_even(n):
    """Return True if n is even."""
    return n % 2 == 0
---
prints fizz buzz
def fizzbuzz(n):
    """Print the numbers to n, with Fizz and Buzz."""
    for i in range(1, n + 1):
        if i % 15 == 0:
            print("FizzBuzz")
        elif i % 3 == 0:
            print("Fizz")
        elif i % 5 == 0:
            print("Buzz")
        else:
            print(i)
---
reads a file
def read_file(path):
    """Return the text of a file."""
    with open(path, encoding="utf-8") as file:
        return file.read()
---
reads the lines of a file
def read_lines(path):
    """Return the lines of a file without their ends."""
    with open(path, encoding="utf-8") as file:
        return [line.rstrip("\\n") for line in file]
---
loads a JSON file
import json

def load_json(path):
    """Return the data of a JSON file."""
    with open(path, encoding="utf-8") as file:
        return json.load(file)
---
converts Celsius to Fahrenheit
def celsius_to_fahrenheit(celsius):
    """Return the temperature in degrees Fahrenheit."""
    return celsius * 9 / 5 + 32
---
says hello
def hello():
    print("Hello, world!")
---
greets a person
def greet(name):
    """Return a greeting."""
    return f"Hello, {name}!"
---
computes a power
def power(base, exponent):
    """Return base raised to exponent."""
    result = 1
    for _ in range(exponent):
        result *= base
    return result
---
transposes a matrix
def transpose(matrix):
    """Return the matrix with rows and columns exchanged."""
    return [list(row) for row in zip(*matrix)]
---
implements a stack
class Stack:
    """A stack of items."""

    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def is_empty(self):
        return not self.items
---
implements a point
class Point:
    """A point in the plane."""

    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __repr__(self):
        return f"Point({self.x}, {self.y})"

    def distance(self, other):
        return ((self.x - other.x) ** 2 + (self.y - other.y) ** 2) ** 0.5
'''


def _parse(sources: str) -> tuple[tuple[str, str], ...]:
    entries = []
    for entry in dedent(sources).strip().split("\n---\n"):
        task, code = entry.split("\n", 1)
        entries.append((task, code))
    return tuple(entries)


FUNCTIONS = _parse(_SOURCES)
"""(what it does, its code), the code without a final newline."""

_ASK = (
    "Write a Python function that {task}.",
    "Write a function that {task}.",
    "Write Python code that {task}.",
    "Show me a Python function that {task}.",
    "Give me Python code that {task}.",
    "Implement a function in Python that {task}.",
)


def python_function(rng: random.Random) -> Dialogue:
    """A request for one of the textbook functions."""
    task, code = rng.choice(FUNCTIONS)
    question = wording(rng, _ASK, task=task)
    return exchange("function", question, f"```python\n{code}\n```", "function|always trained")


def document(rng: random.Random) -> str:
    """Some of the functions as one piece of Python text."""
    return "\n\n\n".join(code for _, code in rng.sample(FUNCTIONS, 3)) + "\n"
